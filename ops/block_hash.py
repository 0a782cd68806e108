"""NH, the inner hash of UMAC (RFC 4418, section 5.2), over blocks of memory, to detect copy errors.
Its keys are fixed, so it protects from accidents only; SHA-256 protects from forgery."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

HASH_BLOCK = 4096
"""Bytes per hash."""
WORDS = HASH_BLOCK // 4
HALF = WORDS // 2
"""Words per half block. NH multiplies each word with the word half a block later."""
AT_ONCE = 64
"""Number of blocks processed at once, so that their words with keys stay in a core's own cache."""


@cache
def hash_keys(device: torch.device) -> Tensor:
    """Returns the fixed keys, int32 [WORDS], the same in every process."""
    draw = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**31), 2**31, (WORDS,), generator=draw)
    return keys.to(torch.int32).to(device)


def hash_blocks(payload: Tensor) -> Tensor:
    """Computes `Ops.block_hashes` of a payload in host memory with numpy, without a compiler."""
    words = payload.numpy().view(np.uint32)
    keys = hash_keys(payload.device).numpy().view(np.uint32)
    hashes = [np.empty(0, np.uint64)]
    for begin in range(0, len(words), AT_ONCE * WORDS):
        part = words[begin : begin + AT_ONCE * WORDS]
        if short := -len(part) % WORDS:
            part = np.pad(part, (0, short))
        keyed = part.reshape(-1, WORDS) + keys
        halves = keyed[:, :HALF], keyed[:, HALF:]
        hashes.append(np.einsum("bw,bw->b", *halves, dtype=np.uint64, casting="unsafe"))
    return torch.from_numpy(np.concatenate(hashes).view(np.int64))
