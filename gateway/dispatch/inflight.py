"""Counts requests in flight, from the resolution of their model to their end."""

from __future__ import annotations

import time
from collections import Counter

from gateway.catalog.catalog import ResolvedModel
from gateway.dispatch.outcomes import Outcomes


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
