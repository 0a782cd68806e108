"""Prediction of the time until a waiting sequence has its first token.

By Little's law it is the work that is computed before, divided by the speed: either the prompts
ahead, computed in full steps, or the rounds in which sequences ahead leave their slots
(`workers.wire.queue_wait`), whichever takes longer. A round has one sequence of mean length in each
slot. These inputs are measured: the seconds of a step, the length of an answer, the ratio of
computed to expected prompt tokens, and the factor by which a backlogged queue takes longer than
predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from workers.policies.step_cost import StepTime
from workers.policies.tenant_queue import QueueLoad
from workers.scheduling.sequence import Sequence
from workers.wire.queue_wait import ASSUMED_ANSWER_TOKENS, slot_wait_s

ASSUMED_ANSWERS = 4.0
"""Number of measured answers as which `ASSUMED_ANSWER_TOKENS` counts."""
KEPT = 0.97
"""Factor by which each new answer reduces the weight of earlier answers, and each new prompt the
weight of earlier prompts."""
SLOWDOWN_MEMORY_S = 10.0
"""Seconds after which earlier measurements of the slowdown count 1/e."""
ASSUMED_S = 0.25
"""Seconds that are added to both the measured and the predicted seconds of backlog, so that a short
measurement has little effect on their ratio."""


@dataclass(frozen=True, slots=True)
class RunningWork:
    """Remaining work of running sequences.

    - releases: number of steps until each sequence frees its slot, in ascending order.
    - answer: expected number of tokens of an answer. It is raised if the answers of running
      sequences are longer than earlier answers.
    """

    releases: list[float]
    answer: float


class _Request(NamedTuple):
    """Mean waiting request. prompt: predicted number of prompt tokens that will be computed.
    answer: expected number of generated tokens. length: number of prompt tokens that were not known
    to be cached when queued, plus `answer`."""

    prompt: float
    answer: float
    length: float


class QueueForecast:
    """Forecast for the queue of one scheduler."""

    def __init__(
        self,
        step_time: StepTime,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
    ) -> None:
        self._step_time = step_time
        self.max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._num_answers = ASSUMED_ANSWERS
        self._num_answer_tokens = ASSUMED_ANSWERS * ASSUMED_ANSWER_TOKENS
        self._num_expected_tokens = self._num_computed_tokens = 1.0
        self._backlog = [0.0] * 4
        """Decaying sums over the steps during which sequences waited: their seconds, their number,
        their tokens, and the positions to which these tokens attended."""
        self._is_backlogged = False
        """Whether sequences waited when the last step ended, so that the next step counts as
        backlog."""

    def record_start(self, num_expected: float, num_computed: int) -> None:
        """Records that a prompt starts. num_expected: number of prompt tokens that were expected to
        be computed. num_computed: number of prompt tokens that are computed."""
        self._num_expected_tokens = KEPT * self._num_expected_tokens + num_expected
        self._num_computed_tokens = KEPT * self._num_computed_tokens + num_computed

    def record_answer(self, num_tokens: int) -> None:
        """Records the length of an answer that has ended, for any reason."""
        self._num_answers = KEPT * self._num_answers + 1
        self._num_answer_tokens = KEPT * self._num_answer_tokens + num_tokens

    def record_step(
        self, seconds: float, num_tokens: int, num_attended: int, *, is_backlogged: bool
    ) -> None:
        """Records a step that ended `seconds` after the one before. is_backlogged: whether
        sequences wait for slots, pages or step time."""
        memory = math.exp(-seconds / SLOWDOWN_MEMORY_S)
        last = [seconds, 1.0, num_tokens, num_attended] if self._is_backlogged else [0.0] * 4
        self._backlog = [
            memory * recent + each for recent, each in zip(self._backlog, last, strict=True)
        ]
        self._is_backlogged = is_backlogged

    @property
    def prompt_tokens_per_s(self) -> float:
        """Predicted number of prompt tokens computed per second while no sequence generates tokens;
        0 if no steps were measured."""
        num_tokens = self._max_batched_tokens
        seconds = self._step_time.predict(num_tokens, 0)
        return num_tokens / (seconds * self._slowdown) if seconds else 0.0

    @property
    def answer_tokens(self) -> float:
        """Mean number of tokens of recent answers."""
        return self._num_answer_tokens / self._num_answers

    def running_work(self, sequences: Iterable[Sequence]) -> RunningWork:
        """Returns the remaining work of these running sequences."""
        sequences = list(sequences)
        num_generated = [sequence.num_generated for sequence in sequences]
        num_answers = self._num_answers + len(sequences)
        answer = (self._num_answer_tokens + sum(num_generated)) / num_answers
        answer = max(answer, self.answer_tokens)
        num_left = [sequence.max_len - len(sequence.tokens) for sequence in sequences]
        # Each running answer is expected to have at least half of a mean answer left.
        expected = [max(answer - number, answer / 2) for number in num_generated]
        return RunningWork(sorted(map(min, num_left, expected)), answer)

    def seconds(
        self, ahead: QueueLoad, num_begun: float, running: RunningWork, memory_tokens: float
    ) -> float:
        """Returns the predicted seconds until a waiting sequence has its first token, or 0 if no
        steps were measured. ahead: load of the waiting sequences that run before this token is
        generated, including the sequence itself. num_begun: number of prompt tokens of running
        sequences that are not computed yet. memory_tokens: number of tokens whose KV fits into
        memory."""
        prompt, answer, length = self._mean_request(ahead, running.answer)
        num_running = len(running.releases)
        num_slots = min(self.max_num_seqs, memory_tokens / max(length, 1.0))
        num_slots = max(num_slots, num_running, 1.0)
        num_prompt = num_begun + ahead.num_requests * prompt
        num_behind = ahead.num_requests - (num_slots - num_running)
        seconds = self._total_s(0, num_prompt, num_prompt * prompt / 2)
        if num_behind > 0:
            attended = prompt * prompt / 2 + answer * (prompt + answer / 2)
            tokens = num_slots * (prompt + answer)
            round_s = self._total_s(answer, tokens, num_slots * attended)
            seconds = max(seconds, slot_wait_s(num_behind, num_slots, round_s))
            releases = running.releases[: math.ceil(num_behind)]
            if releases:
                num_rows = num_running * releases[-1]
                seconds = max(seconds, self._total_s(releases[-1], num_rows, num_rows * length))
        return seconds * self._slowdown

    def _total_s(self, num_steps: float, num_tokens: float, num_attended: float) -> float:
        """Returns the seconds of at least `num_steps` steps with these tokens in total."""
        num_steps = max(num_steps, num_tokens / self._max_batched_tokens)
        return self._step_time.total(num_steps, num_tokens, num_attended)

    @property
    def _slowdown(self) -> float:
        seconds, *work = self._backlog
        return (seconds + ASSUMED_S) / (self._step_time.total(*work) + ASSUMED_S)

    def _mean_request(self, ahead: QueueLoad, answer: float) -> _Request:
        length = ahead.num_tokens / ahead.num_requests
        prompt = length * self._num_computed_tokens / self._num_expected_tokens
        answer = min(ahead.num_output / ahead.num_requests, answer)
        return _Request(prompt, answer, length + answer)
