"""Unpacks integers of a few bits from 32-bit words. The first integer of a word is in the word's
lowest bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def unpack(words: NDArray[np.int32], bits: int, count: int) -> NDArray[np.uint8]:
    """Returns the first `count` integers of each row of words. An integer may span two words."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (octets[..., None] >> shifts) & np.uint8((1 << bits) - 1)
        return codes.reshape(*words.shape[:-1], -1)[..., :count]
    stream = np.unpackbits(octets, axis=-1, count=count * bits, bitorder="little")
    fields = stream.reshape(*words.shape[:-1], count, bits)
    return np.packbits(fields, axis=-1, bitorder="little")[..., 0]
