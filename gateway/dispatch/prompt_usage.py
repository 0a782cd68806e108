"""Counts the usage of one prompt of a request, regardless of which of its sequences computed it."""

from __future__ import annotations

from workers.wire.protocol import PromptProgress, SequenceOutput


class PromptUsage:
    """Counter of the positions of a prompt, each counted once.

    Every sequence computes a prompt from its start, so the positions that any of them has reached
    are the first `num_reached`. A position that a second sequence computes, or the same one after a
    preemption or at another worker, lies below that and is not counted again.

        choice 0, first worker   [cached | computed ...]                     it is lost
        choice 0, second worker  [computed .................. | computed]
        counted as                cached | computed           | computed
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_reached = 0
        """Number of positions that were computed or found in a prefix cache."""
        self.num_cached = 0
        """Number of positions that were in the prefix cache before this request."""
        self._num_tokens = num_tokens

    @property
    def is_whole(self) -> bool:
        return self.num_reached == self._num_tokens

    def note(self, event: SequenceOutput | PromptProgress) -> None:
        """Counts a worker's report about one of the prompt's sequences. A sequence with an output
        has computed its whole prompt."""
        if isinstance(event, PromptProgress):
            self._reach(event.num_positions, event.num_cached)
        else:
            self._reach(self._num_tokens, event.num_cached_tokens)

    def _reach(self, num_positions: int, num_cached: int) -> None:
        if num_positions > self.num_reached:
            self.num_cached += max(min(num_cached, num_positions) - self.num_reached, 0)
            self.num_reached = num_positions
