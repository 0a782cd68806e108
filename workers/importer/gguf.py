"""Imports a GGUF file: writes a canonical folder from its metadata, tokenizer and weights."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from adapters.format import chat_templates
from adapters.format.chat_templates import join_templates, name_unused_templates
from workers.importer.canonical import ImportRefused, complete_config, write_json
from workers.importer.gguf_config import build_config, build_generation_config
from workers.importer.gguf_header import check_gguf
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
from workers.models.spec import ModelSpec, UnsupportedModel

VOCABULARY = {"tokens": str, "merges": str, "scores": (int, float), "token_type": int}
"""Types of the elements of lists that describe the vocabulary."""
MAX_TOKEN_WORK = 1 << 30
"""Maximum sum of the squared lengths of all tokens, which is the time to find their merges. It is
17 million for Gemma."""


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
    check_gguf(source)
    with _naming_values():
        reader = GGUFReader(source)
        metadata = _Metadata({name: field.contents() for name, field in reader.fields.items()})
        metadata.check()
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

    def check(self) -> None:
        """Checks the types of the vocabulary's lists, which must be equally long. Deletes the ids
        of special tokens that are outside the vocabulary. Some files have such an id if the model
        lacks the special token."""
        tokens = self["tokenizer.ggml.tokens"]
        for name, kind in VOCABULARY.items():
            values = self.get(f"tokenizer.ggml.{name}", [])
            if not isinstance(values, list) or not all(isinstance(each, kind) for each in values):
                raise ImportRefused(f"metadata tokenizer.ggml.{name} has values of a wrong type")
        for name in ("scores", "token_type"):
            values = self.get(f"tokenizer.ggml.{name}", tokens)
            if len(values) != len(tokens):
                count = f"{len(values)} values of {len(tokens)} tokens"
                raise ImportRefused(f"metadata tokenizer.ggml.{name} has {count}")
        if (work := sum(len(token) ** 2 for token in tokens)) > MAX_TOKEN_WORK:
            raise ImportRefused(
                "metadata tokenizer.ggml.tokens: the squared lengths of the tokens add up to"
                f" {work}; allowed: {MAX_TOKEN_WORK}"
            )
        for key in [key for key in self if key.endswith("_token_id")]:
            if not isinstance(self[key], int) or not 0 <= self[key] < len(tokens):
                del self[key]


@contextmanager
def _naming_values() -> Generator[None]:
    """Turns errors about values of a wrong type or size in the metadata into ImportRefused."""
    try:
        yield
    except (ImportRefused, UnsupportedModel):
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ImportRefused(
            f"the metadata has a value that is not read: {type(error).__name__}: {error}"
        ) from error
