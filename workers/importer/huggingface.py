"""Imports a Hugging Face directory: writes a canonical folder with its config, tokenizer and
weights. If the checkpoint also has image or audio parts, only the language model is imported."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from adapters.format import chat_templates
from adapters.format.chat_templates import (
    join_templates,
    name_unused_templates,
    read_templates,
)
from adapters.format.generation_fields import name_generation_fields
from adapters.manifest import BaseModelShape
from workers.importer.canonical import CHUNK_BYTES, ImportRefused, complete_config, write_json
from workers.importer.canonical_layout import canonical_layout, is_canonical
from workers.importer.file_tensors import NUMPY_TYPES, FileTensor, check_tensors, file_tensors
from workers.importer.folder_check import POOLING, name_files, refuse_files
from workers.importer.gguf_tensors import to_bfloat16
from workers.importer.json_file import read_object
from workers.importer.quantized import open_quantization
from workers.importer.quantized.dequantized import DequantizedTensor, dequantized_tensors
from workers.importer.quantized.source_tensors import SourceTensors
from workers.importer.safetensors_file import StoredTensor, write_safetensors
from workers.importer.tied_head import HEAD, are_tied, untied_if_stored, with_embedding
from workers.importer.unused_fields import name_config_fields
from workers.importer.weight_formats import (
    INTO,
    ImportFormats,
    block_shape,
    quantized,
)
from workers.models import FAMILIES, read_spec
from workers.models.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    weight_files,
)
from workers.models.progress import ByteProgress, ProgressMeter
from workers.models.spec import ModelSpec, UnsupportedModel
from workers.models.text_part import OTHER_PARTS, is_composite, text_part

if TYPE_CHECKING:
    from workers.importer.transformers_model import ModuleTensor

POOLINGS = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}
"""Supported pooling modes of Sentence Transformers. Maps each mode to its name in pooling.json."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class SamplingRanges(msgspec.Struct):
    """Allowed ranges of values in generation_config.json. The ranges are the same as for parameters
    of requests, because the file sets the defaults of these parameters."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None


def write_from_huggingface(
    source: Path,
    folder: Path,
    formats: ImportFormats,
    check_room: Callable[[int], None],
    progress: ByteProgress | None,
) -> list[str]:
    """Fills the canonical folder from a Hugging Face directory. Checks config, weights and
    tokenizer before it writes the weights. Returns sentences about what the import does not use.

    Stores unquantised weights unchanged, unless `formats` requests int8 or int4. Dequantises
    quantised matrices, unless `formats` requests `keep` and a block format can hold them exactly.
    """
    whole = read_object(source / "config.json")
    refuse_files(source)
    config = text_part(whole)
    notes = ["parts other than the language model are not imported"] if is_composite(whole) else []
    if config.get("model_type") in FAMILIES:
        config, tensors = _native(source, whole, formats)
        notes += name_config_fields(text_part(whole))
    else:
        config, tensors = _of_transformers(source, whole, formats)
    notes += _write_tokenizer(source, folder)
    write_json(folder / "config.json", config)
    if (source / "generation_config.json").is_file():
        generation = _generation_config(source)
        notes += name_generation_fields(generation)
        write_json(folder / "generation_config.json", generation)
    if (source / POOLING).is_file():
        write_json(folder / "pooling.json", {"pooling": _pooling(source)})
    if tensors is None:
        _copy_weights(source, folder, check_room, progress)
    else:
        write_safetensors(folder / SINGLE_FILE, tensors, check_room, progress)
    return notes + name_files(source)


def _of_transformers(
    source: Path, config: dict[str, Any], formats: ImportFormats
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Returns the canonical config and the tensors of a model that workers run with transformers'
    code, because the model has no native family."""
    try:
        from workers.importer.transformers_model import read_transformers_model
    except ImportError as error:
        raise UnsupportedModel(
            "model_type", config.get("model_type"), ", ".join(FAMILIES)
        ) from error
    _refuse_pickles(source)
    model = read_transformers_model(source, config)
    stored: dict[str, StoredTensor] = {}
    for name, tensor in model.tensors.items():
        into = formats if name in model.matrices else ImportFormats()
        stored |= _stored({name: tensor}, into)
    return model.config, stored


def _native(
    source: Path, whole: dict[str, Any], formats: ImportFormats
) -> tuple[dict[str, Any], dict[str, StoredTensor] | None]:
    """Returns the canonical config and the tensors of a model of a native family. Returns None
    instead of the tensors if the weight files can be copied unchanged."""
    quantization = whole.pop("quantization_config", None)
    config = text_part(whole)
    others = OTHER_PARTS if is_composite(whole) else ()
    spec = read_spec(config)
    _refuse_pickles(source)
    if quantization:
        tensors, spec = _dequantized(source, others, spec, quantization)
        config = {key: value for key, value in config.items() if key != "torch_dtype"}
        return complete_config(config | {"dtype": "bfloat16"}, spec), _stored(tensors, formats)
    found = file_tensors(source, others)
    tensors = with_embedding(found, spec)
    is_copied = is_canonical(spec) and not (others or formats.quantise)
    is_copied = is_copied and tensors.keys() == found.keys()
    if not is_canonical(spec):
        shape = BaseModelShape.from_config(complete_config(config, spec), "")
        tensors = canonical_layout(tensors, shape)
    stored = untied_if_stored(tensors, spec)
    check_tensors(tensors, stored)
    if spec.tie_word_embeddings and are_tied(tensors):
        tensors.pop(HEAD, None)
        stored = spec
    config = complete_config(config, stored)
    return config, None if is_copied else _stored(tensors, formats)


def _dequantized(
    source: Path, others: tuple[str, ...], spec: ModelSpec, quantization: object
) -> tuple[dict[str, DequantizedTensor], ModelSpec]:
    """Returns the dequantised tensors, and the spec. The spec is untied if the source has an output
    matrix that differs from the embedding."""
    find = open_quantization(quantization)
    if not is_canonical(spec):
        raise ImportRefused(
            f"quantised checkpoints of the family {spec.model_type} are not supported, "
            "because it joins or reorders its projections"
        )
    found = with_embedding(file_tensors(source, others, NUMPY_TYPES), spec)
    stored = untied_if_stored(found, spec)
    tensors = dequantized_tensors(SourceTensors(found), stored, find)
    if spec.tie_word_embeddings and are_tied(tensors):
        tensors.pop(HEAD, None)
        stored = spec
    return tensors, stored


def _refuse_pickles(source: Path) -> None:
    if (source / SINGLE_FILE).is_file() or (source / INDEX_FILE).is_file():
        return
    pickles = sorted(path.name for pattern in PICKLES for path in source.glob(pattern))
    found = f"only {pickles[0]}, a pickle, which is never opened" if pickles else "none"
    raise ImportRefused(f"{source} needs its weights as safetensors; found {found}")


def _write_tokenizer(source: Path, folder: Path) -> list[str]:
    """Writes the tokenizer's files and the chat template. Returns sentences about what is not
    used."""
    if not (source / "tokenizer.json").is_file():
        raise ImportRefused(f"{source} has no tokenizer.json; other tokenizer files are not read")
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    try:
        Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception
        raise ImportRefused(f"tokenizer.json cannot be read: {error}") from error
    config = read_object(source / "tokenizer_config.json")
    special = source / "special_tokens_map.json"
    if special.is_file() and "added_tokens_decoder" not in config:
        # transformers reads the file only if older versions wrote tokenizer_config.json.
        config |= read_object(special)
    try:
        templates = read_templates(source, config.pop("chat_template", None))
    except UnicodeDecodeError as error:
        raise ImportRefused(f"a chat template is not UTF-8: {error}") from error
    write_json(folder / "tokenizer_config.json", config)
    if (template := join_templates(templates)) is not None:
        (folder / chat_templates.FILE).write_text(template)
    return name_unused_templates(templates)


def _generation_config(source: Path) -> dict[str, Any]:
    config = read_object(source / "generation_config.json")
    try:
        msgspec.convert(config, SamplingRanges)
    except msgspec.ValidationError as error:
        raise ImportRefused(f"generation_config.json: {error}") from error
    return config


def _pooling(source: Path) -> str:
    """Returns the enabled pooling mode, by its name in pooling.json. Raises ImportRefused unless
    exactly one mode is enabled and this mode is supported."""
    config = read_object(source / POOLING)
    prefix = "pooling_mode_"
    modes = [
        name.removeprefix(prefix)
        for name, is_on in config.items()
        if name.startswith(prefix) and is_on is True
    ]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ImportRefused(f"{POOLING} has {modes}; allowed is one of {[*POOLINGS]}")
    return POOLINGS[modes[0]]


def _copy_weights(
    source: Path, folder: Path, check_room: Callable[[int], None], progress: ByteProgress | None
) -> None:
    paths = weight_files(source)
    num_bytes = sum(path.stat().st_size for path in paths)
    check_room(num_bytes)
    meter = ProgressMeter(num_bytes, progress)
    for path in paths:
        with path.open("rb") as reader, (folder / path.name).open("wb") as writer:
            while chunk := reader.read(CHUNK_BYTES):
                writer.write(chunk)
                meter.add(len(chunk))
    if paths[0].name != SINGLE_FILE:
        shutil.copyfile(source / INDEX_FILE, folder / INDEX_FILE)


def _stored(
    tensors: Mapping[str, FileTensor | DequantizedTensor | ModuleTensor],
    formats: ImportFormats,
) -> dict[str, StoredTensor]:
    """Returns the tensors to be written, by their names in the safetensors file."""
    stored: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        asked, format = formats.of(name), formats.target(name, tensor.shape)
        if asked not in INTO:
            stored |= [_unchanged(name, tensor, asked == "keep")]
        elif format is None:
            stored[name] = StoredTensor(
                np.dtype(np.uint16), tensor.shape, lambda t=tensor: to_bfloat16(t.read_floats())
            )
        else:
            stored[f"{name}.{format.name}"] = StoredTensor(
                np.dtype(np.uint8),
                block_shape(tensor.shape, format),
                lambda t=tensor, format=format: quantized(t.read_floats(), format),
            )
    return stored


def _unchanged(
    name: str, tensor: FileTensor | DequantizedTensor | ModuleTensor, keeps_integers: bool
) -> tuple[str, StoredTensor]:
    """Returns a tensor's name in the file, and the tensor with unchanged numbers. If
    `keeps_integers` is set and a block format can hold the tensor's integers exactly, the tensor is
    stored in this block format."""
    read = tensor.read_integers if isinstance(tensor, DequantizedTensor) else None
    if keeps_integers and read is not None and (format := read().format()) is not None:
        blocks = block_shape((tensor.shape[0], tensor.shape[1]), format)
        return f"{name}.{format.name}", StoredTensor(
            np.dtype(np.uint8), blocks, lambda: read().blocks(format)
        )
    return name, StoredTensor(np.dtype(NUMPY_TYPES[tensor.dtype]), tensor.shape, tensor.read)
