"""Tracks requests from the resolution of their model to their end, and ends requests whose API key
is no longer valid."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from gateway.catalog.resolved_model import ResolvedModel
from gateway.dispatch.generation import Generation
from gateway.exceptions import TemplateNotApproved, is_our_fault
from store.database import Database
from store.queries import sql
from web.errors import Unauthenticated

STEPS_PER_OCTAVE = 4
SHORTEST_MS = 0.25
NUM_STEPS = 24 * STEPS_PER_OCTAVE
"""Number of steps of the histogram. The last step ends above one hour."""
CHECK_INTERVAL_S = 1.0
NOT_VALID = "This API key is no longer valid."


class InFlightRequests:
    """Set of the requests in flight. Passes the outcomes of canaries' requests to `outcomes`. `run`
    must run as a background task."""

    def __init__(self, outcomes: Outcomes, is_valid: Callable[[str], bool]) -> None:
        """`is_valid` returns whether the API key with the given id is still valid."""
        self.outcomes = outcomes
        self.by_version: Counter[str] = Counter()
        """Number of open requests by `<tenant id>/<name>/<version>`. Zero counts are removed."""
        self.open: set[InFlightRequest] = set()
        """All open requests, including requests of base models."""
        self._is_valid = is_valid

    def begin(self, target: ResolvedModel, key_id: str) -> InFlightRequest:
        """Begins a request. Must be called after the model is resolved without an await in between,
        because a heartbeat sent during the await would not count the request."""
        return InFlightRequest(self, target, key_id)

    async def run(self) -> None:
        """Ends the generations of requests whose API keys are no longer valid. Checks the keys
        every second until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            keys = {request.key_id for request in self.open}
            ended = {key_id for key_id in keys if not self._is_valid(key_id)}
            for request in [each for each in self.open if each.key_id in ended]:
                if request.generation is not None:
                    request.generation.fail(Unauthenticated(NOT_VALID))


class InFlightRequest:
    def __init__(self, requests: InFlightRequests, target: ResolvedModel, key_id: str) -> None:
        version = target.version
        self.key_id = key_id
        self.generation: Generation | None = None
        """Generation of the answers. None until the request is admitted."""
        self._target = target
        self._started_at = time.perf_counter()
        self._requests = requests
        self._version = (
            f"{version.tenant_id}/{version.name}/{version.version}" if version is not None else None
        )
        requests.open.add(self)
        if self._version is not None:
            requests.by_version[self._version] += 1

    def end(self, failure: BaseException | None) -> None:
        """Ends the request. Must be called once. `failure` is the exception that ended it."""
        self._requests.open.remove(self)
        if self._version is not None:
            self._requests.by_version[self._version] -= 1
            if not self._requests.by_version[self._version]:
                del self._requests.by_version[self._version]
        if self._target.canary is not None:
            first_at = None if self.generation is None else self.generation.first_output_at
            ttft_s = None if first_at is None else first_at - self._started_at
            self._requests.outcomes.add(self._target, failure, ttft_s)


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
