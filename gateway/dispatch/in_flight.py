"""Keeps the running generations of each API key, and ends them when the key is no longer valid."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable

from gateway.catalog.resolved_model import ResolvedModel
from gateway.dispatch.generation import Generation
from gateway.dispatch.outcomes import Outcomes
from web.errors import Unauthenticated

CHECK_INTERVAL_S = 1.0
NOT_VALID = "This API key is no longer valid."


class RunningGenerations:
    """Set of running generations. Call `add` when a generation begins and `remove` when it ends.
    `run` runs in the background."""

    def __init__(self, is_valid: Callable[[str], bool]) -> None:
        """`is_valid` returns whether the API key with the given id is still valid."""
        self._is_valid = is_valid
        self._by_key: defaultdict[str, set[Generation]] = defaultdict(set)
        """Generations by key id."""

    def add(self, key_id: str, generation: Generation) -> None:
        self._by_key[key_id].add(generation)

    def remove(self, key_id: str, generation: Generation) -> None:
        generations = self._by_key[key_id]
        generations.discard(generation)
        if not generations:
            del self._by_key[key_id]

    async def run(self) -> None:
        """Ends the generations of keys that are no longer valid. Checks every second until
        cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for key_id in [each for each in self._by_key if not self._is_valid(each)]:
                for generation in self._by_key[key_id]:
                    generation.fail(Unauthenticated(NOT_VALID))


class InFlightRequests:
    """Counter of requests in flight by adapter version. Passes their outcomes to `outcomes`."""

    def __init__(self, outcomes: Outcomes) -> None:
        self.outcomes = outcomes
        self.by_version: Counter[str] = Counter()
        """Number of open requests by `<tenant id>/<name>/<version>`. Zero counts are removed."""
        self.num_open = 0
        """Number of all open requests, including requests of base models."""

    def begin(self, target: ResolvedModel) -> InFlightRequest:
        """Begins a request. Must be called after the model is resolved without an await in between,
        because a heartbeat sent during the await would not count the request."""
        return InFlightRequest(self, target)


class InFlightRequest:
    def __init__(self, requests: InFlightRequests, target: ResolvedModel) -> None:
        version = target.version
        self.target = target
        self.started_at = time.perf_counter()
        self._requests = requests
        self._key = (
            f"{version.tenant_id}/{version.name}/{version.version}" if version is not None else None
        )
        self._is_over = False
        requests.num_open += 1
        if self._key is not None:
            requests.by_version[self._key] += 1

    def end(
        self, failure: BaseException | None = None, first_token_at: float | None = None
    ) -> None:
        """Ends the request. Only the first call has an effect. `first_token_at` is a time of
        time.perf_counter()."""
        if self._is_over:
            return
        self._is_over = True
        self._requests.num_open -= 1
        if self._key is not None:
            self._requests.by_version[self._key] -= 1
            if not self._requests.by_version[self._key]:
                del self._requests.by_version[self._key]
        ttft_s = None if first_token_at is None else first_token_at - self.started_at
        self._requests.outcomes.add(self.target, failure, ttft_s)
