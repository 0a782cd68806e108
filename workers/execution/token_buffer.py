"""The tokens of running sequences, kept on the device."""

from __future__ import annotations

import torch
from torch import Tensor


class TokenBuffer:
    """The tokens of running sequences on the device, one row each: int32 [rows, max_model_len].

    A step gathers its input ids from here and the sampler's tokens are written back here, so that
    they need not visit the host between two steps.
    """

    def __init__(self, num_rows: int, max_model_len: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_rows, max_model_len, dtype=torch.int32, device=device)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, tokens: list[int]) -> int:
        row = self._free.pop()
        is_pinned = self.tokens.device.type == "cuda"
        host = torch.tensor(tokens, dtype=torch.int32, pin_memory=is_pinned)
        self.tokens[row, : len(tokens)].copy_(host, non_blocking=True)
        return row

    def free(self, row: int) -> None:
        self._free.append(row)

    def gather(self, rows: Tensor, positions: Tensor) -> Tensor:
        """tokens[rows[t], positions[t]] as int32 [T]."""
        return self.tokens[rows, positions]

    def scatter(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        self.tokens[rows, positions] = tokens
