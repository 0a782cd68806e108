"""Charges a request to its tenant's limits before its body is read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gateway.limits.leases import Leases
from gateway.limits.quota import Hold
from gateway.limits.rate_headers import is_shown
from gateway.limits.refusal_limit import RefusalLimit
from gateway.quota_types import Kind, Limit
from web.body_budget import HeldBody


class RequestCharge:
    """Charge of one client request: one request per minute and, if a worker runs it, one concurrent
    request. Counts the request against the limit of refusals if it is refused."""

    def __init__(
        self,
        leases: Leases | None,
        limits: Sequence[Limit],
        refusals: RefusalLimit,
        tenant_id: str,
        body: HeldBody,
    ) -> None:
        """`limits` are all limits of the tenant and the key. Empty if `leases` is None."""
        self._leases = leases
        self._limits = limits
        self._refusals = refusals
        self._tenant_id = tenant_id
        self._body = body
        self._requests: Sequence[Hold] = ()
        self._slots: Sequence[Hold] = ()
        self._num_begun: int | None = None
        """Number of bytes passed to RefusalLimit.begin. None if the request is not open there."""

    async def take(self, num_bytes: int, *, on_worker: bool) -> None:
        """Charges the request to the tenant's limits. With `on_worker`, also takes one of the
        tenant's concurrent requests, and raises if a limit of tokens or money is used up.
        `num_bytes` is the size of the body, as far as it is known. Raises TooManyRefusals,
        QuotaExceeded or QuotaUnavailable."""
        self._body.on_unread = partial(self._refusals.add_unread, self._tenant_id)
        self._refusals.begin(self._tenant_id, num_bytes)
        self._num_begun = num_bytes
        try:
            if self._leases is not None and self._limits:
                await self._take_from(self._leases, on_worker=on_worker)
        except BaseException:
            # The body has not been read, so the refusal does not count.
            self._end_refusal(None)
            raise

    def settle(self, status: int, *, is_ours: bool) -> None:
        """Settles the charge of one request per minute. Called when the answer begins, with its
        `status`. `is_ours` means that the server is at fault. The request is then not charged."""
        self._settle_requests(0 if is_ours else 1)
        self._end_refusal(self._body.num_read if status >= 400 else None)

    def end(self) -> None:
        """Releases the concurrent request. Called when the request has ended. If the client
        disconnected before the answer began, the request per minute stays charged."""
        self._settle_requests(1)
        self._end_refusal(None)
        slots, self._slots = self._slots, ()
        for slot in slots:
            self._settle(slot, 0)

    def headers(self) -> dict[str, str]:
        """Returns the `x-ratelimit-*` headers with the remaining amounts of the limits."""
        if self._leases is None or not self._limits:
            return {}
        return self._leases.headers([limit for limit in self._limits if is_shown(limit.kind)])

    async def _take_from(self, leases: Leases, *, on_worker: bool) -> None:
        now = leases.clock()
        requests = [each for each in self._limits if each.kind is Kind.REQUESTS_PER_MINUTE]
        if requests:
            self._requests = await leases.take([(limit, 1) for limit in requests], now)
        others = [each for each in self._limits if each.kind is not Kind.REQUESTS_PER_MINUTE]
        if not (on_worker and others):
            return
        slots: list[Hold] = []
        for hold in await leases.take([(limit, 1) for limit in others], now):
            if hold.quota.kind is Kind.CONCURRENT_REQUESTS:
                slots.append(hold)
            else:
                leases.settle(hold, 0)
        self._slots = slots

    def _end_refusal(self, num_refused_bytes: int | None) -> None:
        """Ends the request in the RefusalLimit. Only the first call has an effect."""
        num_begun, self._num_begun = self._num_begun, None
        if num_begun is not None:
            self._refusals.end(self._tenant_id, num_begun, num_refused_bytes)

    def _settle_requests(self, used: int) -> None:
        """Settles the holds on requests per minute with `used`. Only the first call has an
        effect."""
        requests, self._requests = self._requests, ()
        for hold in requests:
            self._settle(hold, used)

    def _settle(self, hold: Hold, used: int) -> None:
        assert self._leases is not None
        self._leases.settle(hold, used)
