"""Computes rates, times and goodput from the outcomes of a load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loraplex.load.client import Outcome


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles in milliseconds."""

    p50: float
    p90: float
    p99: float


class Targets(NamedTuple):
    """Maximum milliseconds for a request to count towards goodput. None sets no maximum."""

    ttft_ms: float | None = None
    itl_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a load. Rates are per second of the load's whole duration. Times are of complete
    answers only."""

    requests: int
    completed: int
    requests_per_s: float
    output_per_s: float
    total_per_s: float
    """Tokens per second of prompts and answers."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: Percentiles | None
    """Milliseconds to the first token."""
    itl_ms: Percentiles | None
    """Milliseconds between consecutive events with text."""
    e2e_ms: Percentiles | None
    goodput_per_s: float | None
    """Requests per second that met the targets. None if there are no targets."""
    good_share: float | None
    """Share of all requests, including failed ones, that met the targets."""


def load_seconds(outcomes: Sequence[Outcome]) -> float:
    """Returns the seconds from the first request to the last answer."""
    if not outcomes:
        return 0.0
    return max(o.ended_s for o in outcomes) - min(o.begun_s for o in outcomes)


def summarise(
    outcomes: Sequence[Outcome],
    seconds: float,
    targets: Targets = Targets(),  # noqa: B008
) -> Figures:
    """Returns the figures of outcomes. `seconds` is the duration of the whole load."""
    whole = [o for o in outcomes if not o.error]
    answered = [o for o in whole if len(o.arrivals_s)]
    gaps = [np.diff(o.arrivals_s) for o in answered if len(o.arrivals_s) > 1]
    num_prompt, num_output = sum(o.num_prompt for o in whole), sum(o.num_output for o in whole)
    num_good = None
    if targets != Targets():
        num_good = sum(_is_good(o, targets) for o in answered)
    return Figures(
        requests=len(outcomes),
        completed=len(whole),
        requests_per_s=_rate(len(whole), seconds),
        output_per_s=_rate(num_output, seconds),
        total_per_s=_rate(num_prompt + num_output, seconds),
        prompt_tokens=num_prompt,
        cached_tokens=sum(o.num_cached for o in whole),
        output_tokens=num_output,
        ttft_ms=percentiles(ttft_ms(answered)),
        itl_ms=percentiles(np.concatenate(gaps) * 1e3 if gaps else []),
        e2e_ms=percentiles([(o.ended_s - o.begun_s) * 1e3 for o in whole]),
        goodput_per_s=None if num_good is None else _rate(num_good, seconds),
        good_share=None if num_good is None else num_good / max(len(outcomes), 1),
    )


def failures(outcomes: Iterable[Outcome]) -> list[tuple[int, str, str]]:
    """Returns the number, the code and one message of each kind of error, most frequent first."""
    counts, messages = Counter[str](), dict[str, str]()
    for outcome in outcomes:
        if outcome.error:
            counts[outcome.error] += 1
            messages.setdefault(outcome.error, outcome.message)
    return [(count, code, messages[code]) for code, count in counts.most_common()]


def ttft_ms(outcomes: Iterable[Outcome]) -> list[float]:
    """Returns the milliseconds to the first token of requests that have one."""
    return [(o.arrivals_s[0] - o.begun_s) * 1e3 for o in outcomes if len(o.arrivals_s)]


def percentiles(values: Sequence[float] | np.ndarray) -> Percentiles | None:
    if not len(values):
        return None
    return Percentiles(*(float(value) for value in np.percentile(values, [50, 90, 99])))


def _is_good(outcome: Outcome, targets: Targets) -> bool:
    """Returns whether a request met the targets. The target between tokens applies to the request's
    mean time between tokens."""
    arrivals = outcome.arrivals_s
    if targets.ttft_ms is not None and (arrivals[0] - outcome.begun_s) * 1e3 > targets.ttft_ms:
        return False
    if targets.itl_ms is None or len(arrivals) < 2:
        return True
    return (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) * 1e3 <= targets.itl_ms


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0
