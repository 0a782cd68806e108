"""A Hugging Face directory as a canonical folder: the weights bit for bit."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from workers.importer.canonical import CHUNK_BYTES, ImportRefused, complete_config, write_json
from workers.importer.gguf_tensors import to_bfloat16
from workers.importer.safetensors_file import StoredTensor, read_header, write_safetensors
from workers.importer.weight_formats import (
    INTO,
    ImportFormat,
    block_shape,
    quantized,
    target_format,
    widened,
)
from workers.models import read_spec
from workers.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, weight_files
from workers.models.progress import ByteProgress, ProgressMeter

POOLING = "1_Pooling/config.json"
"""Where Sentence Transformers says how vectors are made of hidden states."""
POOLINGS = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}
"""Its modes that are served, and their names here."""
WIDENED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""Types of weights that can be quantised, as numpy reads them."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class SamplingRanges(msgspec.Struct):
    """Ranges of generation_config.json, which fills in what a caller leaves out: as of requests."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None


def write_from_huggingface(
    source: Path, folder: Path, weight_format: ImportFormat, progress: ByteProgress | None
) -> None:
    """Copies the weights bit for bit, unless `weight_format` quantises them.

    Checks config, weights and tokenizer before the first byte is written.
    """
    config = _read_object(source / "config.json")
    spec = read_spec(config)
    _refuse_pickles(source)
    with Checkpoint(source, "np") as checkpoint:
        checkpoint.check(spec)
    _write_tokenizer(source, folder)
    write_json(folder / "config.json", complete_config(config, spec))
    if (source / "generation_config.json").is_file():
        write_json(folder / "generation_config.json", _generation_config(source))
    if (source / POOLING).is_file():
        write_json(folder / "pooling.json", {"pooling": _pooling(source)})
    if weight_format in INTO:
        _quantize_weights(source, folder, weight_format, progress)
    else:
        _copy_weights(source, folder, progress)


def _refuse_pickles(source: Path) -> None:
    if (source / SINGLE_FILE).is_file() or (source / INDEX_FILE).is_file():
        return
    pickles = sorted(path.name for pattern in PICKLES for path in source.glob(pattern))
    found = f"only {pickles[0]}, a pickle, which is never opened" if pickles else "none"
    raise ImportRefused(f"{source} needs its weights as safetensors; found {found}")


def _write_tokenizer(source: Path, folder: Path) -> None:
    if not (source / "tokenizer.json").is_file():
        raise ImportRefused(f"{source} has no tokenizer.json; other tokenizer files are not read")
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    try:
        Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ImportRefused(f"tokenizer.json cannot be read: {error}") from error
    config = _read_object(source / "tokenizer_config.json")
    template = _chat_template(source, config.pop("chat_template", None))
    write_json(folder / "tokenizer_config.json", config)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


def _chat_template(source: Path, embedded: Any) -> str | None:
    """The template's own file first, as transformers has it; of several named ones, `default`."""
    if (source / "chat_template.jinja").is_file():
        return (source / "chat_template.jinja").read_text()
    if isinstance(embedded, list):
        return {entry["name"]: entry["template"] for entry in embedded}.get("default")
    return embedded


def _generation_config(source: Path) -> dict[str, Any]:
    config = _read_object(source / "generation_config.json")
    try:
        msgspec.convert(config, SamplingRanges)
    except msgspec.ValidationError as error:
        raise ImportRefused(f"generation_config.json: {error}") from error
    return config


def _pooling(source: Path) -> str:
    """The one mode that is on. Raises ImportRefused if it is not served, or there are several."""
    config = _read_object(source / POOLING)
    prefix = "pooling_mode_"
    modes = [
        name.removeprefix(prefix)
        for name, is_on in config.items()
        if name.startswith(prefix) and is_on is True
    ]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ImportRefused(f"{POOLING} has {modes}; allowed is one of {[*POOLINGS]}")
    return POOLINGS[modes[0]]


def _copy_weights(source: Path, folder: Path, progress: ByteProgress | None) -> None:
    paths = weight_files(source)
    meter = ProgressMeter(sum(path.stat().st_size for path in paths), progress)
    for path in paths:
        with path.open("rb") as reader, (folder / path.name).open("wb") as writer:
            while chunk := reader.read(CHUNK_BYTES):
                writer.write(chunk)
                meter.add(len(chunk))
    if paths[0].name != SINGLE_FILE:
        shutil.copyfile(source / INDEX_FILE, folder / INDEX_FILE)


def _quantize_weights(
    source: Path, folder: Path, weight_format: ImportFormat, progress: ByteProgress | None
) -> None:
    """Writes all weights into one file. Raises ImportRefused if they are in blocks already."""
    stored: dict[str, StoredTensor] = {}
    for path in weight_files(source):
        header, begin = read_header(path)
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items()):
            shape, dtype = tuple(entry["shape"]), entry["dtype"]
            if dtype not in WIDENED:
                raise ImportRefused(f"tensor {name} is {dtype}; {weight_format} needs floats")
            read = partial(_read_floats, path, begin + entry["data_offsets"][0], shape, dtype)
            format = target_format(name, shape, weight_format)
            if format is None:
                stored[name] = StoredTensor(
                    np.dtype(np.uint16), shape, lambda read=read: to_bfloat16(read())
                )
            else:
                stored[f"{name}.{format.name}"] = StoredTensor(
                    np.dtype(np.uint8),
                    block_shape(shape, format),
                    lambda read=read, format=format: quantized(read(), format),
                )
    num_bytes = sum(math.prod(each.shape) * each.dtype.itemsize for each in stored.values())
    write_safetensors(folder / SINGLE_FILE, stored, ProgressMeter(num_bytes, progress).add)


def _read_floats(
    path: Path, offset: int, shape: tuple[int, ...], dtype: str
) -> NDArray[np.float32]:
    raw: NDArray[Any] = np.fromfile(path, WIDENED[dtype], math.prod(shape), offset=offset)
    raw = raw.reshape(shape)
    return widened(raw) if dtype == "BF16" else raw.astype(np.float32)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ImportRefused(f"{path.name} is missing in {path.parent}")
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ImportRefused(f"{path.name}: {error}") from error
    if not isinstance(value, dict):
        raise ImportRefused(f"{path.name} is no JSON object")
    return value
