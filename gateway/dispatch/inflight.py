"""Requests under way, from the moment their model is resolved to their end, whatever that is."""

from __future__ import annotations

import time
from collections import Counter

from gateway.catalog.catalog import ResolvedModel
from gateway.dispatch.outcomes import Outcomes


class InFlightRequests:
    """Counts them by version, and hands what became of them to `outcomes`."""

    def __init__(self, outcomes: Outcomes) -> None:
        self.outcomes = outcomes
        self.by_version: Counter[str] = Counter()
        """`<tenant id>/<name>/<version>` to how many; none that is zero."""
        self.num_open = 0
        """Those of base models too."""

    def begin(self, target: ResolvedModel) -> InFlightRequest:
        """Must follow the resolving at once: a request that waits between would be lost."""
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
        """Harmless twice. `first_token_at` is of time.perf_counter()."""
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
