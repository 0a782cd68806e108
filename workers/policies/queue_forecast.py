"""Forecast of the time until a waiting sequence has its first token.

The forecast is a simple model of the scheduler, in which all waiting requests have the mean length
and numbers of sequences may be fractions. While sequences wait, each step has one token of every
generating sequence and as many prompt tokens as the step budget permits. A sequence gets its first
token once a slot is free for it and its prompt and all prompts before it are computed. These inputs
of the model are measured: the seconds of a step, the length of an answer, the ratio of computed to
expected prompt tokens, and the factor by which a backlogged queue takes longer than predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from workers.policies.step_budget import StepBudget
from workers.policies.step_cost import StepTime
from workers.policies.tenant_queue import QueueLoad
from workers.scheduling.sequence import Sequence
from workers.scheduling.terms import Terms

ASSUMED_ANSWER = 64.0
"""Assumed number of tokens of an answer. The assumption has the weight of `ASSUMED_ANSWERS`
measured answers."""
ASSUMED_ANSWERS = 4.0
KEPT = 0.97
"""Factor by which each new answer reduces the weight of earlier answers, and each new prompt the
weight of earlier prompts."""
SLOWDOWN_MEMORY_S = 10.0
"""Seconds after which earlier measurements of the slowdown count 1/e."""
ASSUMED_S = 0.25
"""Seconds that are added to both the measured and the predicted seconds of backlog, so that a short
measurement has little effect on their ratio."""
NUM_HALVINGS = 6
"""Number of bisection steps to find the number of generating sequences."""


@dataclass(frozen=True, slots=True)
class RunningWork:
    """Remaining work of running sequences.

    - releases: number of steps until each sequence frees its slot, in ascending order.
    - answer: expected number of tokens of an answer. It is raised if the answers of running
      sequences are longer than earlier answers.
    - tpot_s: smallest `Terms.tpot_s` (promised seconds between tokens) of the sequences.
    - gap_factor: smallest `Terms.gap_factor` of the sequences.
    """

    releases: list[float]
    answer: float
    tpot_s: float
    gap_factor: float


class _Request(NamedTuple):
    """Mean waiting request. prompt: predicted number of prompt tokens that will be computed.
    answer: expected number of generated tokens. length: number of prompt tokens that were not known
    to be cached when queued, plus `answer`."""

    prompt: float
    answer: float
    length: float


class _Steps(NamedTuple):
    """Mean step while sequences wait. num_joining: number of prompt tokens in the step. seconds:
    duration of the step. slot_s: duration of a step while all slots are taken. Such a step may have
    fewer prompt tokens, because a sequence starts only when another ends."""

    num_joining: float
    seconds: float
    slot_s: float


class QueueForecast:
    """Forecast for the queue of one scheduler."""

    def __init__(
        self,
        step_time: StepTime,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        max_token_gap_s: float,
    ) -> None:
        self._step_time = step_time
        self.max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._max_token_gap_s = max_token_gap_s
        self._num_answers = ASSUMED_ANSWERS
        self._num_answer_tokens = ASSUMED_ANSWERS * ASSUMED_ANSWER
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
        num_tokens = self._num_joining(0.0, 0.0, self._max_token_gap_s, self._max_token_gap_s)
        seconds = self._step_time.predict(num_tokens, 0)
        return num_tokens / (seconds * self._slowdown) if seconds else 0.0

    def running_work(self, sequences: Iterable[Sequence]) -> RunningWork:
        """Returns the remaining work of these running sequences."""
        sequences = list(sequences)
        num_generated = [sequence.num_generated for sequence in sequences]
        num_answers = self._num_answers + len(sequences)
        answer = (self._num_answer_tokens + sum(num_generated)) / num_answers
        answer = max(answer, self._num_answer_tokens / self._num_answers)
        num_left = [sequence.max_len - len(sequence.tokens) for sequence in sequences]
        # Each running answer is expected to have at least half of a mean answer left.
        expected = [max(answer - number, answer / 2) for number in num_generated]
        tpot_s = min((sequence.terms.tpot_s for sequence in sequences), default=math.inf)
        gap_factor = min((sequence.terms.gap_factor for sequence in sequences), default=math.inf)
        return RunningWork(sorted(map(min, num_left, expected)), answer, tpot_s, gap_factor)

    def seconds(
        self,
        ahead: QueueLoad,
        num_begun: float,
        running: RunningWork,
        terms: Terms,
        memory_tokens: float,
    ) -> float:
        """Returns the predicted seconds until a waiting sequence has its first token, or 0 if no
        steps were measured. ahead: load of the waiting sequences that run before this token is
        generated, including the sequence itself. num_begun: number of prompt tokens of running
        sequences that are not computed yet. terms: terms of the sequence. memory_tokens: number of
        tokens whose KV fits into memory."""
        request = self._mean_request(ahead, running.answer)
        num_running = len(running.releases)
        num_fitting = memory_tokens / max(request.length, 1.0)
        num_slots = max(min(self.max_num_seqs, num_fitting), num_running, 1.0)
        num_most = min(num_slots, num_running + ahead.num_requests)
        steps = self._steps(request, num_slots, num_most, running, terms)
        num_tokens = num_begun + ahead.num_requests * request.prompt
        seconds = num_tokens / steps.num_joining * steps.seconds
        num_behind = math.ceil(ahead.num_requests - (num_slots - num_running))
        if num_behind > 0:
            own_steps = request.prompt / steps.num_joining
            releases = running.releases + [
                request.answer + number * own_steps
                for number in range(int(num_slots) - num_running)
            ]
            num_rounds, number = divmod(num_behind - 1, len(releases))
            num_steps = num_rounds * request.answer + sorted(releases)[number]
            seconds = max(seconds, num_steps * steps.slot_s + own_steps * steps.seconds)
        return seconds * self._slowdown

    @property
    def _slowdown(self) -> float:
        seconds, *work = self._backlog
        return (seconds + ASSUMED_S) / (self._step_time.total(*work) + ASSUMED_S)

    def _mean_request(self, ahead: QueueLoad, answer: float) -> _Request:
        length = ahead.num_tokens / ahead.num_requests
        prompt = length * self._num_computed_tokens / self._num_expected_tokens
        answer = min(ahead.num_output / ahead.num_requests, answer)
        return _Request(prompt, answer, length + answer)

    def _steps(
        self,
        request: _Request,
        num_slots: float,
        num_most: float,
        running: RunningWork,
        terms: Terms,
    ) -> _Steps:
        """Returns the mean step in the steady state, in which sequences start as fast as they end.
        With more generating sequences, a step has room for fewer prompt tokens, so that sequences
        start more slowly. num_most: upper bound of the number of generating sequences."""
        step_time, context = self._step_time, request.prompt / 2
        gap_s = self._max_token_gap_s * min(running.gap_factor, terms.gap_factor)
        tpot_s = min(running.tpot_s, terms.tpot_s, gap_s)

        def num_joining(num_rows: float) -> float:
            return self._num_joining(num_rows, num_rows * request.length, tpot_s, gap_s, context)

        def is_too_many(num_rows: float) -> bool:
            return request.answer * num_joining(num_rows) < num_rows * request.prompt

        low, num_rows = 0.0, num_most
        if is_too_many(num_rows):
            high = num_rows
            for _ in range(NUM_HALVINGS):
                num_rows = (low + high) / 2
                low, high = (low, num_rows) if is_too_many(num_rows) else (num_rows, high)
        joining = num_joining(num_rows)
        rows_s = step_time.predict(num_rows, num_rows * request.length)
        starting = num_slots * request.prompt / request.answer if request.answer else joining
        return _Steps(
            joining,
            rows_s + step_time.seconds_of(joining, context),
            rows_s + step_time.seconds_of(min(starting, joining), context),
        )

    def _num_joining(
        self, num_rows: float, num_attended: float, tpot_s: float, gap_s: float, context: float = 0
    ) -> float:
        """Returns the number of prompt tokens that `StepBudget` permits in a step with `num_rows`
        generating sequences."""
        is_alone = num_rows < 1
        budget = StepBudget(
            self._step_time,
            num_tokens=self._max_batched_tokens - int(num_rows),
            decode_s=0.0 if is_alone else self._step_time.predict(num_rows, num_attended),
            over_share_s=math.inf,
            seconds=math.inf if is_alone else tpot_s,
            max_gap_s=math.inf if is_alone else gap_s,
        )
        return max(budget.room(context, is_over_share=False), 1)
