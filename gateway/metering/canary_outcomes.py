"""Counts the outcomes of requests of canaries, and adds them to the counts in the database."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from gateway.catalog.resolved_model import ResolvedModel
from gateway.exceptions import TemplateNotApproved, is_our_fault
from store.database import Database
from store.queries import sql

STEPS_PER_OCTAVE = 4
SHORTEST_MS = 0.25
NUM_STEPS = 24 * STEPS_PER_OCTAVE
"""Number of steps of the histogram. The last step ends above one hour."""


class Tally(msgspec.Struct):
    """Outcomes of some requests. `ttft` is a histogram of their times to first token. `ttft[n]`
    counts times up to 2 ^ ((n + 1) / 4) / 4 milliseconds, and above the bound of `ttft[n - 1]`."""

    requests: int = 0
    errors: int = 0
    ttft: list[int] = []

    def add(self, other: Tally) -> None:
        self.requests += other.requests
        self.errors += other.errors
        self.ttft += [0] * (len(other.ttft) - len(self.ttft))
        for step, count in enumerate(other.ttft):
            self.ttft[step] += count

    @property
    def error_rate(self) -> float:
        return self.errors / self.requests if self.requests else 0.0


def ttft_step(seconds: float) -> int:
    """Returns the index of the histogram step that counts a time in seconds."""
    octaves = math.log2(max(seconds * 1000, SHORTEST_MS) / SHORTEST_MS)
    return min(max(math.ceil(octaves * STEPS_PER_OCTAVE) - 1, 0), NUM_STEPS - 1)


def median_ms(ttft: Sequence[int]) -> float:
    """Returns the median of a non-empty histogram in milliseconds, interpolated logarithmically
    within a step."""
    half = sum(ttft) / 2
    for step, count in enumerate(ttft):
        if half <= count:
            return SHORTEST_MS * 2 ** ((step + half / count) / STEPS_PER_OCTAVE)
        half -= count
    raise ValueError("nothing was counted")


class Outcomes:
    """Counts of outcomes that are not written to the database yet, by canary and version. A canary
    is identified by the id of the alias change that set it."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, int], Tally] = {}

    def add(
        self, target: ResolvedModel, failure: BaseException | None, ttft_s: float | None
    ) -> None:
        """Counts an ended request for the version that served it, if its alias has a canary. Errors
        caused by the client and disconnects do not count as errors."""
        if target.canary is None or target.canary.change is None or target.version is None:
            return
        key = target.canary.change, target.version.version
        tally = Tally(requests=1, errors=int(_is_error(failure)))
        if ttft_s is not None:
            step = ttft_step(ttft_s)
            tally.ttft = [*[0] * step, 1]
        self._pending.setdefault(key, Tally()).add(tally)

    async def write(self, database: Database, gateway_id: str) -> None:
        """Adds the outcomes to the database's counts. If that fails, keeps the outcomes for the
        next call. The database ignores outcomes of a canary whose alias has been changed in the
        meantime."""
        if not self._pending:
            return
        taken, self._pending = self._pending, {}
        rows = [
            {"change": change, "version": version, **msgspec.structs.asdict(tally)}
            for (change, version), tally in taken.items()
        ]
        try:
            async with database.acquire() as connection:
                await connection.execute(sql["outcomes_add"], gateway_id, rows)
        except BaseException:
            for key, tally in taken.items():
                self._pending.setdefault(key, Tally()).add(tally)
            raise


def _is_error(failure: BaseException | None) -> bool:
    """Returns whether the failure counts against the version. An unapproved template does, because
    it fails every chat of the canary."""
    if not isinstance(failure, Exception):
        return False
    return isinstance(failure, TemplateNotApproved) or is_our_fault(failure)
