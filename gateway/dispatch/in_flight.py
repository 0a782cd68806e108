"""Tracks requests from the resolution of their model to their end, and ends requests whose API key
is no longer valid."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from gateway.catalog.resolved_model import ResolvedModel
from gateway.dispatch.generation import Generation
from gateway.metering.canary_outcomes import Outcomes
from web.errors import Unauthenticated

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
    """Request in flight. Must be created after the model is resolved without an await in between,
    because a heartbeat sent during the await would not count the request."""

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
