"""Exclusion of ids without a token from sampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class UnnamedRows:
    """Columns of the logits whose ids have no token. They are not drawn, because a drawn id without
    a token would be billed although its text is empty, unless a request names the id in
    `logit_bias` or `stop_token_ids`, or has a list of allowed tokens that contains it."""

    def __init__(self, ids: Sequence[int], device: torch.device) -> None:
        self._ids = frozenset(ids)
        self._on_host = np.array(ids, np.int64)
        self._on_device = torch.tensor(ids, dtype=torch.int64, device=device)

    def find_named(
        self, samples: Iterable[tuple[Iterable[int], NDArray[Any] | None]]
    ) -> NDArray[np.int64]:
        """Returns the indices of the samples that may draw such ids, and these ids, int64 [2, n].
        samples: ids that the request of each sample names, and the sample's mask of allowed tokens
        (see `SampleInput`)."""
        found: list[tuple[int, int]] = []
        for index, (named, mask) in enumerate(samples if self._ids else ()):
            ids = self._ids.intersection(named)
            if mask is not None:
                bits = mask[self._on_host >> 5] >> (self._on_host & 31) & 1
                ids = ids.union(self._on_host[bits != 0].tolist())
            found.extend((index, token) for token in ids)
        return np.array(found, np.int64).reshape(-1, 2).T.copy()

    def exclude(self, logits: Tensor, named: Tensor) -> None:
        """Sets the columns to -inf, in place, except the entries in `named`."""
        if self._ids:
            rows, ids = named
            kept = logits[rows, ids]
            logits.index_fill_(1, self._on_device, float("-inf"))
            logits[rows, ids] = kept
