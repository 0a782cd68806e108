"""Decides from a checkpoint's weights whether the output matrix is tied to the embedding.

As in transformers, the weights decide if the config says that the two matrices are tied. They stay
tied if the checkpoint has only one of them, or both with equal values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from workers.importer.file_tensors import FileTensor
from workers.importer.quantized.dequantized import DequantizedTensor
from workers.models.spec import ModelSpec

T = TypeVar("T")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CHUNK_ROWS = 4096


def with_embedding(tensors: Mapping[str, T], spec: ModelSpec) -> dict[str, T]:
    """Returns the tensors. If the matrices are tied and the checkpoint has only the output matrix,
    the matrix gets the embedding's name."""
    table, head = (name.removesuffix("weight") for name in (EMBEDDING, HEAD))
    if not spec.tie_word_embeddings or any(name.startswith(table) for name in tensors):
        return dict(tensors)
    return {
        table + name.removeprefix(head) if name.startswith(head) else name: tensor
        for name, tensor in tensors.items()
    }


def untied_if_stored(tensors: Mapping[str, object], spec: ModelSpec) -> ModelSpec:
    """Returns the spec, untied if the checkpoint has an output matrix in addition to the
    embedding."""
    head = HEAD.removesuffix("weight")
    is_tied = not any(name.startswith(head) for name in tensors)
    return replace(spec, tie_word_embeddings=spec.tie_word_embeddings and is_tied)


def are_tied(tensors: Mapping[str, FileTensor] | Mapping[str, DequantizedTensor]) -> bool:
    """Returns whether the output matrix is missing or has the values of the embedding. Matrices in
    files are compared some rows at a time, to save memory."""
    table, head = tensors[EMBEDDING], tensors.get(HEAD)
    if head is None:
        return True
    if isinstance(table, DequantizedTensor) or isinstance(head, DequantizedTensor):
        return np.array_equal(table.read_floats(), head.read_floats())
    num_rows = table.shape[0]
    for start in range(0, num_rows, CHUNK_ROWS):
        count = min(CHUNK_ROWS, num_rows - start)
        rows, others = (each.rows(start, count, None).read_floats() for each in (table, head))
        if not np.array_equal(rows, others):
            return False
    return True
