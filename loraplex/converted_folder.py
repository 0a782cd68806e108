"""Converts an adapter folder in MLX's format, or with several weight files, to peft's two files."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adapters.errors import AdapterRejected
from adapters.format.tensor_headers import ITEM_BYTES, read_header
from adapters.format.tensor_names import PREFIX
from adapters.format.validator import CONFIG_NAME, WEIGHTS_NAME
from loraplex.errors import ApiFailure, Refused
from loraplex.folder_serving import read_json

INDEX_NAME = WEIGHTS_NAME + ".index.json"
MLX_NAME = "adapters.safetensors"
UNSIGNED = {2: np.uint16, 4: np.uint32}
"""Unsigned integer type for each size in bytes. A tensor's numbers are read as such integers,
because they are copied and never computed with."""
FACTORS = {".lora_a": ".lora_A.weight", ".lora_b": ".lora_B.weight"}
"""Endings of peft's tensor names, by the endings of MLX's names."""


class Tensor(NamedTuple):
    """Tensor of a safetensors file."""

    dtype: str
    """Name of the type in the safetensors format."""
    bits: NDArray[Any]
    """Numbers of the tensor as unsigned integers of the same size."""


@contextlib.contextmanager
def converted(folder: Path, tell: Callable[[str], None]) -> Iterator[Path]:
    """Yields the folder itself if it has peft's files. Otherwise converts it, and yields a
    temporary folder with the two files. `tell` gets a description of the conversion. Raises
    ApiFailure or Refused, which name what cannot be converted."""
    if (folder / WEIGHTS_NAME).is_file():
        yield folder
        return
    if (folder / INDEX_NAME).is_file() and (folder / CONFIG_NAME).is_file():
        write, told = _join, f"{folder} has its factors in several files, which are sent as one"
    elif (folder / MLX_NAME).is_file():
        write, told = _convert_mlx, f"{folder} is converted from MLX's form to peft's"
    else:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="loraplex-") as place:
        write(folder, Path(place))
        tell(told)
        yield Path(place)


def _join(folder: Path, target: Path) -> None:
    """Writes the tensors of all files that the index names into one file."""
    index = read_json(folder / INDEX_NAME)
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):  # pyright: ignore[reportUnknownVariableType]
        raise ApiFailure(f"{folder / INDEX_NAME} has no weight_map of names to files")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(map(str, files.values()))):  # pyright: ignore[reportUnknownArgumentType]
        if Path(name).name != name or not (folder / name).is_file():
            raise ApiFailure(f"{folder / INDEX_NAME} names {name}, which is not in the folder")
        tensors |= _read(folder / name)
    _write(target / WEIGHTS_NAME, tensors)
    (target / CONFIG_NAME).write_bytes((folder / CONFIG_NAME).read_bytes())


def _convert_mlx(folder: Path, target: Path) -> None:
    """Transposes the factors, names them as peft does, and writes peft's configuration."""
    given = read_json(folder / CONFIG_NAME)
    kind, parameters = given.get("fine_tune_type", "lora"), given.get("lora_parameters")
    if kind != "lora":
        raise ApiFailure(f"{folder} is an MLX folder of type {kind!r}: train with lora")
    rank, scale = (
        (parameters.get("rank"), parameters.get("scale"))
        if isinstance(parameters, dict)
        else (None, None)
    )
    if not isinstance(rank, int) or not isinstance(scale, int | float):
        raise ApiFailure(
            f"{folder} is an MLX folder ({MLX_NAME}), and its {CONFIG_NAME} lacks lora_parameters"
            " with rank and scale: copy the one that mlx_lm.lora wrote beside the weights"
        )
    tensors: dict[str, Tensor] = {}
    for name, tensor in _read(folder / MLX_NAME).items():
        end = name[-len(".lora_a") :]
        if end not in FACTORS or tensor.bits.ndim != 2:
            raise ApiFailure(f"{folder / MLX_NAME} has {name}, which is no factor of a LoRA")
        if name.removesuffix(end).endswith("embed_tokens"):
            raise ApiFailure(
                f"{folder / MLX_NAME} has {name}: MLX applies factors of the embedding to a tied"
                ' output matrix, too. Leave embed_tokens out of "keys" in lora_parameters'
            )
        peft_name = f"{PREFIX}{name.removesuffix(end)}{FACTORS[end]}"
        tensors[peft_name] = Tensor(tensor.dtype, tensor.bits.T)
    _write(target / WEIGHTS_NAME, tensors)
    (target / CONFIG_NAME).write_text(json.dumps(_peft_config(given, rank, scale, tensors)))


def _peft_config(
    given: Mapping[str, Any], rank: int, scale: float, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    modules = {name.rsplit(".lora_", 1)[0].removeprefix(PREFIX) for name in tensors}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": sorted(modules),
        "bias": "none",
        "base_model_name_or_path": given.get("model"),
    }


def _read(path: Path) -> dict[str, Tensor]:
    """Reads all tensors of a safetensors file. Raises Refused if the file is not in this format."""
    tensors: dict[str, Tensor] = {}
    try:
        with path.open("rb") as file:
            header = read_header(file, path.stat().st_size)
            for name, entry in header.tensors.items():
                file.seek(header.data_start + entry.data_offsets[0])
                unsigned = UNSIGNED[ITEM_BYTES[entry.dtype]]
                bits = np.fromfile(file, unsigned, math.prod(entry.shape))
                tensors[name] = Tensor(entry.dtype, bits.reshape(entry.shape))
    except AdapterRejected as rejected:
        raise Refused(rejected.to_dict()) from None
    return tensors


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, bits) in tensors.items():
        offsets = [offset, offset + bits.nbytes]
        header[name] = {"dtype": dtype, "shape": list(bits.shape), "data_offsets": offsets}
        offset += bits.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, bits in tensors.values():
            file.write(np.ascontiguousarray(bits).tobytes())
