"""Imports a GGUF file: writes a canonical folder from its metadata, tokenizer and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from adapters.format import chat_templates
from adapters.format.chat_templates import join_templates, name_unused_templates
from workers.importer.canonical import ImportRefused, complete_config, write_json
from workers.importer.gguf_config import build_config, build_generation_config
from workers.importer.gguf_tensors import GGUFTensors
from workers.importer.gguf_tokenizer import build_tokenizer, build_tokenizer_config
from workers.importer.safetensors_file import Blocks, StoredTensor, write_safetensors
from workers.importer.weight_formats import (
    ImportFormats,
    block_shape,
    quantized,
    widened,
)
from workers.models import read_spec
from workers.models.checkpoint import SINGLE_FILE, expected_tensors
from workers.models.progress import ByteProgress
from workers.models.spec import ModelSpec


def write_from_gguf(
    source: Path,
    folder: Path,
    formats: ImportFormats,
    check_room: Callable[[int], None],
    progress: ByteProgress | None,
) -> list[str]:
    """Fills the canonical folder from a GGUF file. Weights are dequantised in float32 and stored as
    bfloat16, rounded to nearest even, unless `formats` names another format. Returns sentences
    about what the import does not use."""
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise ImportRefused(f"{source.name} is no GGUF file: {error}") from error
    metadata = _Metadata({name: field.contents() for name, field in reader.fields.items()})
    metadata.leave_out_unknown_tokens()
    if metadata.get("split.count", 1) > 1:
        raise ImportRefused(f"split.count = {metadata['split.count']}: merge the parts first")
    tensors = GGUFTensors(reader.tensors, metadata.get("general.architecture", ""))
    config = build_config(metadata, tensors)
    spec = read_spec(config)
    expected = dict(expected_tensors(spec))
    tensors.check(expected)

    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", build_tokenizer_config(metadata))
    write_json(folder / "config.json", complete_config(config, spec))
    write_json(folder / "generation_config.json", build_generation_config(metadata))
    templates = read_chat_templates(metadata)
    if (template := join_templates(templates)) is not None:
        (folder / chat_templates.FILE).write_text(template)
    stored = dict(_stored(tensors, name, shape, spec, formats) for name, shape in expected.items())
    write_safetensors(folder / SINGLE_FILE, stored, check_room, progress)
    return name_unused_templates(templates)


def read_chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of the file's chat templates by name."""
    names: list[str] = metadata.get("tokenizer.chat_templates", [])
    found = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    found[chat_templates.DEFAULT] = metadata.get("tokenizer.chat_template")
    return {name: text for name, text in found.items() if text}


def _stored(
    tensors: GGUFTensors,
    name: str,
    shape: tuple[int, ...],
    spec: ModelSpec,
    formats: ImportFormats,
) -> tuple[str, StoredTensor]:
    """Returns a tensor's name in the safetensors file, and the tensor to be written there."""
    if formats.of(name) == "keep" and (format := tensors.format(name)) is not None:
        read = partial(tensors.read_blocks, name, spec)
    elif (format := formats.target(name, shape)) is not None:
        target = format

        def read() -> Blocks:
            return quantized(widened(tensors.read(name, spec)), target)
    else:
        return name, StoredTensor(np.dtype(np.uint16), shape, partial(tensors.read, name, spec))
    blocks = block_shape(shape, format)
    return f"{name}.{format.name}", StoredTensor(np.dtype(np.uint8), blocks, read)


class _Metadata(dict[str, Any]):
    """Metadata of a GGUF file. Indexing with a missing key raises ImportRefused, naming the key."""

    def __missing__(self, key: str) -> Any:
        raise ImportRefused(f"metadata {key} is missing")

    def leave_out_unknown_tokens(self) -> None:
        """Deletes the ids of special tokens that are outside the vocabulary. Some files have such
        an id if the model lacks the special token."""
        size = len(self["tokenizer.ggml.tokens"])
        for key in [key for key in self if key.endswith("_token_id")]:
            if not 0 <= self[key] < size:
                del self[key]
