"""Integers of a few bits that are packed into words of 32 bits, the lowest bits first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def unpack(words: NDArray[np.int32], bits: int, count: int) -> NDArray[np.uint8]:
    """Returns `count` integers for each row of words. Integers may cross the words' ends."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (octets[..., None] >> shifts) & np.uint8((1 << bits) - 1)
        return codes.reshape(*words.shape[:-1], -1)[..., :count]
    stream = np.unpackbits(octets, axis=-1, count=count * bits, bitorder="little")
    fields = stream.reshape(*words.shape[:-1], count, bits)
    return np.packbits(fields, axis=-1, bitorder="little")[..., 0]


def scale_groups(
    codes: NDArray[Any],
    zeros: NDArray[Any] | int,
    scales: NDArray[np.float32],
    groups: NDArray[np.int32],
) -> NDArray[np.float32]:
    """Returns (code - zero) * scale of a matrix [N, K].

    zeros, scales: [N, G]; a single zero is that of all. groups: the group of each column.
    """
    values = codes.astype(np.float32)
    if isinstance(zeros, int):
        values -= np.float32(zeros)
    else:
        values -= zeros.astype(np.float32)[:, groups]
    values *= scales[:, groups]
    return values
