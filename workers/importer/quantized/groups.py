"""Assigns the columns of a quantised matrix to the groups that share a scale."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workers.importer.canonical import ImportRefused
from workers.importer.quantized.source_tensors import SourceTensors


def group_size(width: int, num_groups: int, asked: object) -> int:
    """Returns the number of neighbouring columns in a group.

    asked: value of `group_size` in the configuration. It is ignored if there is a single group.
    Raises ImportRefused if the columns do not form `num_groups` groups of this size.
    """
    if num_groups == 1:
        return width
    if not isinstance(asked, int) or asked < 1 or -(-width // asked) != num_groups:
        raise ImportRefused(
            f"quantization_config: group_size {asked!r} does not make "
            f"{num_groups} groups of {width} columns"
        )
    return asked


def read_groups(
    tensors: SourceTensors, name: str, width: int, num_groups: int, asked: object
) -> NDArray[np.int32]:
    """Returns the index of each column's group. Reads the indices from the tensor `name` if it
    exists.

    If the tensor is missing or contains only -1, each group consists of neighbouring columns, and
    `group_size` returns their number.
    """
    if name in tensors:
        groups = tensors.require(name, (width,), "I32").read()
        if (groups != -1).any():
            if groups.min() < 0 or groups.max() >= num_groups:
                raise ImportRefused(f"tensor {name} names groups beyond its {num_groups}")
            return groups
    return np.arange(width, dtype=np.int32) // np.int32(group_size(width, num_groups, asked))
