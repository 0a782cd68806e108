"""Reads the tensors of a GGUF file with the names and the layout of Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from gguf import GGMLQuantizationType, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray

from ops.weight_format import BLOCK_SIZES, WeightFormat
from workers.importer.canonical import ImportRefused
from workers.importer.safetensors_file import BFloat16, Blocks
from workers.models.spec import ModelSpec

Bits = TypeVar("Bits", np.uint16, np.uint8)
CHUNK_ELEMENTS = 1 << 22
NAN = 0x7FC0
ROPE_FACTORS = "rope_freqs.weight"

TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_BLOCK = BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GGUFTensors:
    """Tensors of an open GGUF file, by their names in Hugging Face checkpoints."""

    def __init__(self, tensors: Iterable[ReaderTensor], architecture: str) -> None:
        self._is_llama = architecture == "llama"
        self._norm_offset = 1.0 if architecture.startswith("gemma") else 0.0
        blocks = GEMMA_BLOCK if architecture.startswith("gemma") else BLOCK
        self._tensors = {_rename(tensor.name, blocks): tensor for tensor in tensors}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def rope_factors(self) -> np.ndarray | None:
        """Returns the frequency factors, float32 [head_dim / 2], which a GGUF file stores in place
        of Llama 3's rope parameters. Returns None if the file has no such tensor."""
        tensor = self._tensors.get(ROPE_FACTORS)
        if tensor is None:
            return None
        if tensor.tensor_type != GGMLQuantizationType.F32:
            raise ImportRefused(f"tensor {tensor.name} is {tensor.tensor_type.name}, not F32")
        return np.asarray(tensor.data, np.float32).ravel()

    def check(self, expected: dict[str, tuple[int, ...]]) -> None:
        """Raises ImportRefused if an expected tensor is missing or has another shape, if the file
        has an additional tensor, or if a tensor has a type that cannot be dequantised."""
        for name, shape in expected.items():
            if name not in self._tensors:
                raise ImportRefused(f"tensor {name} is missing")
            if (got := tuple(map(int, self._tensors[name].shape[::-1]))) != shape:
                raise ImportRefused(f"tensor {name} has shape {got}, its metadata says {shape}")
        if stray := self._tensors.keys() - expected.keys() - {ROPE_FACTORS}:
            raise ImportRefused(f"tensor {min(stray)} belongs to no module of this model")
        for tensor in self._tensors.values():
            try:
                dequantize(np.atleast_2d(tensor.data)[:1], tensor.tensor_type)
            except NotImplementedError as error:
                kind = tensor.tensor_type.name
                raise ImportRefused(f"tensor {tensor.name} is {kind}, which is not read") from error

    def format(self, name: str) -> WeightFormat | None:
        """Returns the block format of the tensor, or None if workers cannot serve its type."""
        format = WeightFormat.__members__.get(self._tensors[name].tensor_type.name)
        return format if format in BLOCK_SIZES else None

    def read_blocks(self, name: str, spec: ModelSpec) -> Blocks:
        """Returns the quantised rows of a matrix without converting them, in the row order of the
        Hugging Face checkpoint."""
        rows = np.atleast_2d(self._tensors[name].data)
        return self._reordered(name, rows, spec)

    def read(self, name: str, spec: ModelSpec) -> BFloat16:
        """Returns a tensor dequantised to bfloat16, in the layout of the Hugging Face checkpoint.
        Subtracts 1 from Gemma's norm weights, because GGUF files store these weights plus 1."""
        if name.endswith("norm.weight"):
            return _dequantise(self._tensors[name], self._norm_offset)
        return self._reordered(name, _dequantise(self._tensors[name], 0.0), spec)

    def _reordered(self, name: str, weight: NDArray[Bits], spec: ModelSpec) -> NDArray[Bits]:
        if self._is_llama and name.endswith("q_proj.weight"):
            return _split_halves(weight, spec.num_heads)
        if self._is_llama and name.endswith("k_proj.weight"):
            return _split_halves(weight, spec.num_kv_heads)
        return weight


def _rename(name: str, blocks: dict[str, str]) -> str:
    if name == ROPE_FACTORS:
        return name
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, module, kind = match.groups()
        if module in blocks:
            return f"model.layers.{layer}.{blocks[module]}.{kind}"
    elif (match := re.fullmatch(r"(\w+)\.weight", name)) and match[1] in TOP:
        return f"{TOP[match[1]]}.weight"
    raise ImportRefused(f"tensor {name} is of no supported module")


def _dequantise(tensor: ReaderTensor, offset: float) -> BFloat16:
    """Dequantises a tensor in float32, subtracts `offset` from each value, and rounds to bfloat16.
    Works on a chunk of rows at a time, to save memory."""
    shape = tuple(map(int, tensor.shape[::-1]))
    rows = np.atleast_2d(tensor.data)
    out = np.empty((len(rows), shape[-1]), np.uint16)
    step = max(1, CHUNK_ELEMENTS // shape[-1])
    for start in range(0, len(rows), step):
        values = dequantize(rows[start : start + step], tensor.tensor_type)
        out[start : start + step] = to_bfloat16(np.asarray(values, np.float32) - np.float32(offset))
    return out.reshape(shape)


def to_bfloat16(exact: NDArray[np.float32]) -> BFloat16:
    """Rounds numbers to bfloat16 (to nearest, ties to even). Returns the bits of the results."""
    bits = exact.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(exact)] = NAN
    return rounded


def _split_halves(weight: NDArray[Bits], num_heads: int) -> NDArray[Bits]:
    """Reorders the rows of Llama's q_proj or k_proj from the order of GGUF to the order of Hugging
    Face checkpoints. In GGUF, the two rows of a rotated pair are neighbours. In Hugging Face
    checkpoints, one row is in the first half of the head and the other row in the second half."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
