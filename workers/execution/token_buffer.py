"""Token ids of running sequences, stored on the device."""

from __future__ import annotations

import torch


class TokenBuffer:
    """Token ids of running sequences, one slot each: int32 [slots, max_model_len] on the device.

    A step gathers its input ids from the buffer, and the sampler writes drawn tokens to it, so that
    these tokens need not be copied to the host between two steps.
    """

    def __init__(self, num_slots: int, max_model_len: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_slots, max_model_len, dtype=torch.int32, device=device)
        self._free = list(range(num_slots - 1, -1, -1))

    def allocate(self, tokens: list[int]) -> int:
        slot = self._free.pop()
        self.write(slot, 0, tokens)
        return slot

    def write(self, slot: int, position: int, tokens: list[int]) -> None:
        """Copies tokens from the host into the slot, starting at `position`."""
        is_pinned = self.tokens.device.type == "cuda"
        host = torch.tensor(tokens, dtype=torch.int32, pin_memory=is_pinned)
        self.tokens[slot, position : position + len(tokens)].copy_(host, non_blocking=True)

    def free(self, slot: int) -> None:
        self._free.append(slot)
