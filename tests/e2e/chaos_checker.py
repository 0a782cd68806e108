"""What holds of a service under faults, whatever they are, proved from the log of a run.

python -m tests.e2e.chaos_checker LOG
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests.e2e.chaos_log import (
    Answered,
    Asked,
    Billed,
    Calm,
    Event,
    Healed,
    Held,
    Known,
    Limited,
    Struck,
    read_log,
)
from tests.outcome import End, Outcome
from tests.scale import scaled

E = TypeVar("E")

RECOVERY_S = scaled(50, 5)
"""After a target is ready again, faults of its are no excuse any more."""
LATE_S = scaled(10, 1)
"""So much after the time that it had for its first token a request may be answered: to be late
counts from where the request arrives."""
OVER_BUDGET = "insufficient_quota"
ERRORS = {
    *("worker_lost", "no_worker", "draining", "overloaded", "deadline_exceeded"),
    *("poison_request", "adapter_unavailable", "model_unavailable"),
    *("catalog_stale", "quota_unavailable", "usage_unavailable", "database_unavailable"),
}
"""What a fault may be called."""


class Ask(NamedTuple):
    """One request and what became of it."""

    asked: Asked
    answered: Answered
    known: Known

    @property
    def outcome(self) -> Outcome:
        return self.answered.outcome

    def __str__(self) -> str:
        outcome = self.outcome
        return f"request {self.asked.number} ({outcome.request_id}, {outcome.code or outcome.end})"


class Fault(NamedTuple):
    kind: str
    target: str
    begin: float
    end: float

    def meets(self, ask: Ask, after_s: float = 0.0) -> bool:
        """after_s: so long it is felt when it is over."""
        return self.begin <= ask.answered.at and ask.asked.at <= self.end + after_s


class Evidence:
    """The events of a run, by what they are about."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        known = {each.request: each for each in self.of(Known)}
        answers: defaultdict[int, list[Answered]] = defaultdict(list)
        for answered in self.of(Answered):
            answers[answered.number].append(answered)
        self.unanswered = [a for a in self.of(Asked) if len(answers[a.number]) != 1]
        self.asks = [
            Ask(asked, answers[asked.number][0], known[asked.request])
            for asked in self.of(Asked)
            if len(answers[asked.number]) == 1
        ]
        ends = {healed.number: healed.at for healed in self.of(Healed)}
        self.faults = [
            Fault(s.kind, s.target, s.at, ends.get(s.number, float("inf"))) for s in self.of(Struck)
        ]
        self.rows: defaultdict[str, list[Billed]] = defaultdict(list)
        for row in self.of(Billed):
            self.rows[row.request_id].append(row)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self._events if isinstance(event, kind)]


def broken_promises(events: Sequence[Event]) -> list[str]:
    """In words, one each; none if all were kept."""
    evidence = Evidence(events)
    checks = (
        *(_ends, _causes, _texts, _deadlines, _ledger),
        *(_nothing_unasked_is_billed, _budgets, _rest, _calm),
    )
    return [broken for check in checks for broken in check(evidence)]


def _ends(evidence: Evidence) -> Iterator[str]:
    """Each answer ends, and says how."""
    for asked in evidence.unanswered:
        yield f"request {asked.number} has not one end"
    for ask in evidence.asks:
        if ask.outcome.end in (End.TRUNCATED, End.HUNG):
            yield f"{ask} has no proper end"
        if ask.outcome.end is End.FAILED and ask.outcome.code not in ERRORS | {OVER_BUDGET}:
            yield f"{ask} failed without a name"


def _causes(evidence: Evidence) -> Iterator[str]:
    """What failed did so by a fault that can have that effect."""
    limited = {each.tenant for each in evidence.of(Limited)}
    calm_at = max((calm.at for calm in evidence.of(Calm)), default=float("inf"))
    for ask in evidence.asks:
        outcome, gateway = ask.outcome, ask.asked.gateway
        own = {f.kind for f in evidence.faults if f.target == gateway and f.meets(ask)}
        if outcome.code == OVER_BUDGET:
            if ask.asked.tenant not in limited:
                yield f"{ask} is over a budget that {ask.asked.tenant} does not have"
        elif outcome.end is End.FAILED:
            is_excused = any(fault.meets(ask, RECOVERY_S) for fault in evidence.faults)
            if ask.asked.at > calm_at or not is_excused:
                yield f"{ask} failed, and nothing was wrong"
        elif outcome.end in (End.BROKEN, End.UNREACHABLE):
            # Who is told to end finishes what it has begun.
            causes = {"gateway-kill"} | ({"gateway-term"} if outcome.status is None else set())
            if not own & causes:
                yield f"{ask}: its gateway was there"


def _texts(evidence: Evidence) -> Iterator[str]:
    """Nobody reads anything else than what is said undisturbed."""
    for ask in evidence.asks:
        told, known = ask.outcome.tokens.get(0, []), ask.known.tokens
        if told != known[: len(told)]:
            yield f"{ask} says something else"
        elif ask.outcome.end is End.FINISHED and len(told) < len(known):
            yield f"{ask} is finished too soon"


def _deadlines(evidence: Evidence) -> Iterator[str]:
    for ask in evidence.asks:
        if ask.answered.at - ask.asked.at > ask.asked.limit_s:
            yield f"{ask} outlived its limit"
        head_s = ask.outcome.head_s
        is_late = head_s is not None and head_s > ask.asked.timeout_s + LATE_S
        if ask.asked.is_streamed and is_late:
            yield f"{ask} was not told in time"


def _ledger(evidence: Evidence) -> Iterator[str]:
    """What was told is there, once and as it was told."""
    for request_id, rows in evidence.rows.items():
        if len(rows) > 1:
            yield f"{request_id} is billed {len(rows)} times"
    for ask in evidence.asks:
        outcome = ask.outcome
        row = next(iter(evidence.rows.get(outcome.request_id, [])), None)
        if outcome.end is End.FINISHED:
            whole = ask.known.prompt_tokens, len(ask.known.tokens)
            if outcome.usage != whole:
                yield f"{ask} is said to have used {outcome.usage}, not {whole}"
            if row is None:
                yield f"{ask} is not billed"
            elif (row.prompt_tokens, row.completion_tokens) != outcome.usage:
                yield f"{ask} is billed otherwise than told"
        if row is not None:
            if row.tenant != ask.asked.tenant:
                yield f"{ask} is billed to {row.tenant}"
            if row.completion_tokens < len(outcome.tokens.get(0, [])):
                yield f"{ask} is billed for less than came"


def _nothing_unasked_is_billed(evidence: Evidence) -> Iterator[str]:
    """Who lost his connection before the head of an answer does not know what it is called."""
    known = {ask.outcome.request_id for ask in evidence.asks}
    num_unknown = len(evidence.rows.keys() - known)
    num_nameless = sum(
        a.outcome.end is End.BROKEN and not a.outcome.request_id for a in evidence.asks
    )
    if num_unknown > num_nameless:
        yield f"{num_unknown} requests are billed that {num_nameless} can have asked"


def _budgets(evidence: Evidence) -> Iterator[str]:
    used: Counter[str] = Counter()
    for row in evidence.of(Billed):
        used[row.tenant] += row.metered_tokens
    for limited in evidence.of(Limited):
        if used[limited.tenant] > limited.tokens:
            yield f"{limited.tenant} used {used[limited.tenant]} tokens of {limited.tokens}"


def _rest(evidence: Evidence) -> Iterator[str]:
    for held in evidence.of(Held):
        if held.amount:
            yield f"at rest: {held.what} {held.amount:g}"


def _calm(evidence: Evidence) -> Iterator[str]:
    """All is well soon after the last fault, and was seen to be at each gateway."""
    calm = next(iter(evidence.of(Calm)), None)
    if calm is None:
        yield "it never became calm"
        return
    last = max((fault.end for fault in evidence.faults), default=calm.at)
    if not 0 <= calm.at - last <= RECOVERY_S:
        yield f"it was {calm.at - last:.1f} s from the last fault until all were served again"
    after = [ask for ask in evidence.asks if ask.asked.at >= calm.at]
    well = {ask.asked.gateway for ask in after if ask.outcome.end is End.FINISHED}
    for gateway in sorted({ask.asked.gateway for ask in evidence.asks} - well):
        yield f"{gateway} finished nothing in the end"


if __name__ == "__main__":
    found = broken_promises(read_log(Path(sys.argv[1]).read_bytes().splitlines()))
    print("\n".join(found) or "all promises were kept")
    sys.exit(bool(found))
