"""Answer of one sequence: collects its results, and builds the messages that report them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workers.execution.step_input import SequenceResult
from workers.scheduling.sequence import Sequence
from workers.wire.protocol import (
    FinishReason,
    Pooling,
    PromptProgress,
    SequenceOutput,
    TokenLogprobs,
)


class Answer:
    """Results of a sequence that are not sent yet. Written by the engine."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._logprobs: list[TokenLogprobs] = []
        self._num_unsent = 0
        """Number of tokens at the end of the sequence that are not sent yet."""
        self._num_reported = 0
        """Number of prompt positions that were reported as computed."""
        self._vector: NDArray[np.float32] | None = None
        """Sum of the vectors of finished steps (kind `embed`), or None before the first vector."""

    def add(self, start: int, result: SequenceResult) -> None:
        """Adds the prompt scores and the vector of a step whose first token is at position `start`.
        Replaces earlier results if a preempted sequence is computed again from its start."""
        if result.prompt_logprobs is not None:
            self._prompt_logprobs[start:] = result.prompt_logprobs
        if result.vector is not None:
            is_first = start == 0 or self._vector is None
            self._vector = result.vector if is_first else self._vector + result.vector

    def progress(self, num_computed: int) -> PromptProgress | None:
        """Returns a report that `num_computed` tokens are computed, or None if the previous report
        already counted these prompt tokens."""
        sequence = self.sequence
        num_positions = min(num_computed, sequence.num_prompt)
        if num_positions <= self._num_reported:
            return None
        self._num_reported = num_positions
        return PromptProgress(sequence.request.id, num_positions, sequence.num_cached)

    def append(
        self,
        tokens: list[int],
        finish_reason: FinishReason | None,
        logprobs: list[TokenLogprobs] | None,
        now: float,
    ) -> SequenceOutput | None:
        """Appends tokens generated at `now` to the sequence, which ends if `finish_reason` is set.
        Returns the output to send, or None if the tokens are sent with a later output."""
        sequence, request = self.sequence, self.sequence.request
        is_first = not sequence.is_begun
        if is_first:
            sequence.times.first_token_s = now
        sequence.times.last_token_s = now
        sequence.tokens += tokens
        if logprobs is not None:
            self._logprobs += logprobs[: len(tokens)]
        self._num_unsent += len(tokens)
        is_edge = is_first or finish_reason is not None
        if not is_edge and self._num_unsent < request.stream_interval:
            return None
        has_scores = is_first and request.params.prompt_logprobs is not None
        output = SequenceOutput(
            request.id,
            sequence.tokens[-self._num_unsent :],
            logprobs=self._logprobs or None,
            prompt_logprobs=self._prompt_logprobs if has_scores else None,
            finish_reason=finish_reason,
            stop_token=tokens[-1] if finish_reason is FinishReason.STOP else None,
            num_cached_tokens=sequence.num_cached if is_edge else 0,
            times=sequence.traced(now) if is_edge else None,
        )
        self._logprobs, self._num_unsent = [], 0
        return output

    def finish_prompt(self, now: float) -> SequenceOutput:
        """Returns the final output of a sequence whose prompt is only scored or embedded."""
        sequence, request = self.sequence, self.sequence.request
        if self._vector is None:
            scores, reason = self._prompt_logprobs, FinishReason.LENGTH
            times = sequence.traced(now)
            return SequenceOutput(request.id, [], None, scores, reason, times=times)
        num_summed = sequence.num_prompt if request.pooling is Pooling.MEAN else 1
        return SequenceOutput(
            request.id,
            tokens=[],
            finish_reason=FinishReason.STOP,
            num_cached_tokens=sequence.num_cached,
            times=sequence.traced(now),
            vector=(self._vector / np.float32(num_summed)).astype("<f4").tobytes(),
        )
