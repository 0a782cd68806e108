"""Reads matrices of bitsandbytes: NF4 and FP4 (with or without quantised scales), and LLM.int8."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from workers.importer.canonical import ImportRefused
from workers.importer.quantized.matrix import QuantizedMatrix
from workers.importer.quantized.source_tensors import SourceTensors

TYPES = ("nf4", "fp4")
MAX_STATE_BYTES = 4096
ROW_MAJOR = 0
"""Number of the only supported layout of LLM.int8 matrices. The other layouts depend on the GPU."""
INT8_STEP = np.float32(1 / 127)
BlockSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class QuantState(msgspec.Struct):
    """Description of a 4-bit matrix, which bitsandbytes stores as JSON next to the matrix."""

    blocksize: BlockSize
    shape: list[int]
    nested_blocksize: BlockSize | None = None
    nested_offset: float = 0.0


def find_bitsandbytes(
    module: str, shape: tuple[int, int], tensors: SourceTensors
) -> QuantizedMatrix | None:
    for kind in TYPES:
        state = f"{module}.weight.quant_state.bitsandbytes__{kind}"
        if state in tensors:
            return _four_bits(f"{module}.weight", state, shape, tensors)
    if tensors.has_dtype(f"{module}.weight", "I8"):
        return _int8(module, shape, tensors)
    return None


def _four_bits(
    name: str, state_name: str, shape: tuple[int, int], tensors: SourceTensors
) -> QuantizedMatrix:
    state = _read_state(state_name, shape, tensors)
    count = math.prod(shape)
    num_blocks = -(-count // state.blocksize)
    # bitsandbytes' setting quant_storage changes the tensor's declared type, but not its bytes.
    codes = tensors[name]
    num_bytes = math.prod(codes.shape) * _item_bytes(name, codes.dtype)
    if num_bytes != -(-count // 2):
        raise ImportRefused(f"tensor {name} has {num_bytes} bytes, {shape} of 4 bits needs another")
    tensors.require(f"{name}.quant_map", (16,), "F32")
    parts = [name, state_name, f"{name}.absmax", f"{name}.quant_map"]
    if state.nested_blocksize is None:
        tensors.require(f"{name}.absmax", (num_blocks,), "F32")
    else:
        tensors.require(f"{name}.absmax", (num_blocks,), "U8")
        tensors.require(f"{name}.nested_quant_map", (256,), "F32")
        num_nested = -(-num_blocks // state.nested_blocksize)
        tensors.require(f"{name}.nested_absmax", (num_nested,), "F32")
        parts += [f"{name}.nested_quant_map", f"{name}.nested_absmax"]

    def read() -> NDArray[np.float32]:
        octets = codes.read().view(np.uint8).ravel()
        nibbles = np.stack([octets >> 4, octets & 15], axis=-1).ravel()[:count]
        scales = tensors[f"{name}.absmax"].read()
        if state.nested_blocksize is not None:
            codebook = tensors[f"{name}.nested_quant_map"].read()
            steps = tensors[f"{name}.nested_absmax"].read()
            scales = codebook[scales] * _repeated(steps, state.nested_blocksize, num_blocks)
            scales += np.float32(state.nested_offset)
        values = tensors[f"{name}.quant_map"].read()[nibbles]
        values *= _repeated(scales, state.blocksize, count)
        return values.reshape(shape)

    return QuantizedMatrix(frozenset(parts), read)


def _read_state(name: str, shape: tuple[int, int], tensors: SourceTensors) -> QuantState:
    stored = tensors[name]
    if stored.dtype != "U8" or math.prod(stored.shape) > MAX_STATE_BYTES:
        raise ImportRefused(f"tensor {name} is no JSON of at most {MAX_STATE_BYTES} bytes")
    try:
        state = msgspec.json.decode(stored.read().tobytes(), type=QuantState)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ImportRefused(f"tensor {name}: {error}") from error
    if tuple(state.shape) != shape:
        raise ImportRefused(f"tensor {name} says shape {state.shape}, config.json says {shape}")
    return state


def _item_bytes(name: str, dtype: str) -> int:
    sizes = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}
    if dtype not in sizes:
        raise ImportRefused(f"tensor {name} is {dtype}; allowed: {', '.join(sizes)}")
    return sizes[dtype]


def _repeated(scales: NDArray[np.float32], block: int, count: int) -> NDArray[np.float32]:
    """Returns the scale of each of `count` elements. Each scale applies to `block` neighbouring
    elements."""
    return np.repeat(scales, block)[:count]


def _int8(module: str, shape: tuple[int, int], tensors: SourceTensors) -> QuantizedMatrix:
    name, scales, layout = f"{module}.weight", f"{module}.SCB", f"{module}.weight_format"
    codes = tensors.require(name, shape, "I8")
    tensors.require(scales, (shape[0],), "F32")
    parts = {name, scales}
    if layout in tensors:
        parts.add(layout)
        if int(tensors.require(layout, (), "U8").read()) != ROW_MAJOR:
            raise ImportRefused(
                f"tensor {layout} is not {ROW_MAJOR}: rows are stored in another order"
            )

    def read() -> NDArray[np.float32]:
        return codes.read() * tensors[scales].read()[:, None] * INT8_STEP

    return QuantizedMatrix(frozenset(parts), read)
