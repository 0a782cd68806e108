"""Renews this gateway's leases of limits in the database, and lets requests wait for renewals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from gateway import telemetry
from gateway.exceptions import QuotaExceeded, QuotaUnavailable
from gateway.limits.database_clock import DatabaseClock
from gateway.limits.lease_book import (
    LeaseBook,
    LeaseRecall,
    LeaseRequest,
    LeaseResponse,
    Waiter,
)
from gateway.limits.quota import Hold
from gateway.limits.rate_headers import exceeded, rate_limit_headers
from gateway.quota_types import BUDGETS, Limit
from store.database import Database
from store.errors import ApiError
from store.periodic import repeat
from store.queries import sql

log = logging.getLogger(__name__)

CHANNEL = "loraplex_quota"
"""Name of the PostgreSQL NOTIFY channel on which gateways receive recalls of leases."""
SWEEP_INTERVAL_S = 1.0
"""Maximum seconds between two renewals. Renewals also show other gateways that this one is
alive."""
PACE_S = 0.01
"""Seconds between two renewals while requests wait, so that one renewal serves many requests."""
RENEWAL_TIMEOUT_S = 2.0
REQUESTS_AT_ONCE = 1000
"""Maximum number of lease requests in one renewal. The database handles a few thousand lease
requests per second, and other gateways' renewals wait while it handles a renewal."""
RETRY_S = 0.25
REFUSED_S = 0.5
"""Seconds for which a refusal is remembered. During this time, other requests that need at least
the refused amount are refused without another renewal."""
UPKEEP_INTERVAL_S = 30.0

Wanted = Sequence[tuple[Limit, int]]


class LeaseRenewal(Protocol):
    async def renew(
        self, holder: str, number: int, requests: list[LeaseRequest]
    ) -> list[LeaseResponse] | None:
        """Returns the database's responses in the order of the requests, or None if the holder has
        lost all its leases. Repeating a renewal with the same `number` returns the same responses.
        Raises ApiError."""
        ...

    async def listen(self, hear: Callable[[LeaseRecall], None]) -> None: ...

    async def upkeep(self) -> None: ...

    async def release(self, holders: Sequence[str]) -> None:
        """Removes the ended gateways `holders` from the database. Their usage must be loaded. Their
        leases of the current minute count as used until the minute ends. Raises ApiError."""
        ...


class PostgresLeaseRenewal:
    def __init__(
        self, database: Database, lifetime_s: float, clock: DatabaseClock | None = None
    ) -> None:
        """`lifetime_s` is the number of seconds that leases last after a renewal. `clock` is set
        to the database's time by each renewal."""
        self._database = database
        self._lifetime_s = lifetime_s
        self._clock = clock or DatabaseClock()

    async def renew(
        self, holder: str, number: int, requests: list[LeaseRequest]
    ) -> list[LeaseResponse] | None:
        given = [msgspec.structs.asdict(request) for request in requests]
        async with self._database.acquire() as connection:
            sent_at = time.monotonic()
            row = await connection.fetchrow(
                sql["quota_exchange"], holder, number, self._lifetime_s, given
            )
            received_at = time.monotonic()
        assert row is not None
        self._clock.note_exchange(sent_at, row["database_at"], received_at)
        responses = row["responses"]
        return None if responses is None else msgspec.convert(responses, list[LeaseResponse])

    async def listen(self, hear: Callable[[LeaseRecall], None]) -> None:
        def heard(payload: str) -> None:
            # An empty payload means that the connection is new. Recalls that were sent before it
            # was open need no handling here, because the gateways that still need the leases repeat
            # their recalls.
            if payload:
                hear(msgspec.json.decode(payload, type=LeaseRecall))

        await self._database.listen(CHANNEL, heard)

    async def upkeep(self) -> None:
        async with self._database.acquire() as connection:
            await connection.execute(sql["quota_upkeep"])

    async def release(self, holders: Sequence[str]) -> None:
        async with self._database.acquire() as connection:
            await connection.execute(sql["quota_release"], list(holders))


class Leases:
    """Leases of one gateway. Call `take` before a request runs and `settle` when it ends. `run`
    renews the leases in the background.

    While the database is unavailable, the gateway continues with its leases for at most
    `lifetime_s`. In a new minute, it uses the share of each limit that it had leased in the
    previous minute. After `lifetime_s`, other gateways may be granted its leases.
    """

    def __init__(
        self,
        renewal: LeaseRenewal,
        gateway_id: str,
        lifetime_s: float,
        clock: Callable[[], float] = time.time,
        wait_s: float = 1.0,
    ) -> None:
        """`clock` returns the time, in seconds since 1970, from which the windows of limits are
        computed. `wait_s` is the maximum number of seconds that a request waits for the database,
        or for other gateways to return leases."""
        self.holder = gateway_id
        """Id under which the database stores this gateway's leases. It changes when all leases are
        lost, so that earlier reservations are not settled from new leases."""
        self._gateway_id = gateway_id
        self._renewal = renewal
        self._lifetime_s = lifetime_s
        self.clock = clock
        self._wait_s = wait_s
        self._book = LeaseBook()
        self._number = 0
        self._num_losses = 0
        self._is_away = False
        """Whether the last renewal has failed."""
        self._valid_until = time.monotonic() + lifetime_s
        self._wake = asyncio.Event()
        self._ends: dict[Waiter, asyncio.Future[None]] = {}
        self._delivery: asyncio.Task[None] | None = None
        """Renewal in flight. It continues after `run` is cancelled, because its response may grant
        leases."""

    async def take(self, wanted: Wanted, admitted_at: float) -> list[Hold]:
        """Reserves an amount of each of the limits, or nothing. Daily and monthly budgets are
        charged in the window of `admitted_at`, and other limits in the current window. Raises
        QuotaExceeded or QuotaUnavailable."""
        deadline = time.monotonic() + self._wait_s
        while True:
            if not time.monotonic() < min(deadline, self._valid_until):
                reason = "is unavailable" if self._is_away else "did not answer in time"
                raise QuotaUnavailable(f"Limits cannot be checked: the database {reason}.")
            now = self.clock()
            holds = [
                Hold(
                    self._book.quota(limit, admitted_at if limit.kind in BUDGETS else now, now),
                    amount,
                )
                for limit, amount in wanted
            ]
            for hold in holds:
                if hold.amount > hold.quota.limit:
                    raise self._refusal(hold)
            if self._book.take(holds):
                if self._book.is_due:
                    self._wake.set()
                return holds
            refused = next((hold for hold in holds if self._was_refused(hold)), None)
            if refused is not None:
                raise self._refusal(refused)
            telemetry.limit_waits.add(1)
            waiter = self._book.wait(holds)
            if self._is_away:
                self._book.share()
                self._end(self._book.serve(self.clock()))
            await self._served(waiter, deadline)
            if waiter.is_served:
                return holds
            if waiter.refused is not None:
                raise self._remember_refusal(waiter.refused)

    def _was_refused(self, hold: Hold) -> bool:
        """Returns whether a hold of this amount or less was refused recently. While a request waits
        for the database's response about the limit, the last refusal applies for longer."""
        quota = hold.quota
        if hold.fits or hold.amount < quota.refused_amount:
            return False
        believed_s = REFUSED_S + (self._wait_s if quota.num_waiting else 0.0)
        return time.monotonic() < quota.refused_at + believed_s

    def _remember_refusal(self, hold: Hold) -> QuotaExceeded:
        hold.quota.refused_at = time.monotonic()
        hold.quota.refused_amount = hold.amount
        return self._refusal(hold)

    def _refusal(self, hold: Hold) -> QuotaExceeded:
        telemetry.limit_refusals.add(1, hold.quota.kind.value)
        return exceeded(hold, self.clock())

    def settle(self, hold: Hold, used: int) -> None:
        self._book.settle(hold, used)
        if hold.quota.num_waiting:
            self._end(self._book.serve(self.clock()))

    def headers(self, limits: Sequence[Limit]) -> dict[str, str]:
        """Returns the `x-ratelimit-*` headers for these limits, with the amounts that remain."""
        now = self.clock()
        return rate_limit_headers([self._book.quota(limit, now, now) for limit in limits], now)

    def believe_catalog(self) -> None:
        """Clears the mark `is_void` of limits that the database reported as deleted. Called with
        each new catalog, which shows the limits that exist now."""
        self._book.believe_catalog()

    async def run(self) -> None:
        """Renews leases until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            what = "limits are not tidied up"
            tasks.create_task(repeat(what, self._renewal.upkeep, UPKEEP_INTERVAL_S))
            next_sweep = 0.0
            while True:
                self._wake.clear()
                if time.monotonic() >= next_sweep:
                    self._book.sweep(self.clock())
                    next_sweep = time.monotonic() + SWEEP_INTERVAL_S
                requests = self._book.gather(self.clock())
                self._delivery = asyncio.create_task(self._deliver(requests))
                await asyncio.shield(self._delivery)
                self._end(self._book.serve(self.clock()))
                await asyncio.sleep(PACE_S)
                if not self._book.is_due:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(next_sweep - time.monotonic()):
                            await self._wake.wait()

    async def release(self, gateways: Sequence[str]) -> None:
        """Removes the gateways from the database. They must have ended, and their usage must be
        loaded. Raises ApiError."""
        await self._renewal.release(gateways)

    async def leave(self) -> None:
        """Returns the unused leases to the database. Called after `run` has ended, when no request
        is in flight and all usage is loaded. If it is cancelled, the gateway's leases of the
        current minute count as used until the minute ends. Raises ApiError."""
        try:
            if self._delivery is not None:
                await self._delivery
            requests = self._book.give_back(self.clock())
            for i in range(0, len(requests), REQUESTS_AT_ONCE):
                await self._renewed(requests[i : i + REQUESTS_AT_ONCE])
        finally:
            if self._delivery is not None:
                self._delivery.cancel()
        await self._renewal.release([self._gateway_id])

    async def _deliver(self, requests: list[LeaseRequest]) -> None:
        """Sends the requests to the database, in several renewals if there are more than
        `REQUESTS_AT_ONCE`. Sends an empty renewal if there are none."""
        responses: list[LeaseResponse] = []
        is_late = False
        for i in range(0, max(1, len(requests)), REQUESTS_AT_ONCE):
            part, sent_at = await self._renewed(requests[i : i + REQUESTS_AT_ONCE])
            is_late = is_late or sent_at > self._valid_until
            self._valid_until = sent_at + self._lifetime_s
            if part is None:
                self._lose()
                return
            responses += part
        self._book.apply(responses)
        if is_late:
            # The leases had expired before this renewal, so other gateways may have been granted
            # the same amounts of limits per minute.
            self._book.give_up()

    async def _renewed(
        self, requests: list[LeaseRequest]
    ) -> tuple[list[LeaseResponse] | None, float]:
        """Sends one renewal, and repeats it until the database answers. Returns the responses, and
        the value of time.monotonic() when the last attempt was sent."""
        self._number += 1
        while True:
            sent_at = time.monotonic()
            try:
                async with asyncio.timeout(RENEWAL_TIMEOUT_S):
                    responses = await self._renewal.renew(self.holder, self._number, requests)
                break
            except Exception as error:
                telemetry.lease_failures.add(1)
                if not self._is_away:
                    unforeseen = None if isinstance(error, ApiError | TimeoutError) else error
                    reason = str(error) or "the database does not answer"
                    log.warning(
                        "renewing the leases of limits failed, using the leases held: %s",
                        reason,
                        exc_info=unforeseen,
                    )
                    self._book.see_nothing()
                self._is_away = True
                self._book.share()
                self._end(self._book.serve(self.clock()))
                await asyncio.sleep(RETRY_S)
        self._is_away = False
        telemetry.lease_renewal.record(time.monotonic() - sent_at)
        return responses, sent_at

    def _lose(self) -> None:
        log.warning("leases of limits expired: the database was unavailable for too long")
        self._book.lose()
        self._num_losses += 1
        self.holder = f"{self._gateway_id}#{self._num_losses}"
        self._number = 0
        for waiter in list(self._ends):
            self._end([waiter])

    async def _served(self, waiter: Waiter, deadline: float) -> None:
        """Waits until the waiter is served or refused, or its window has ended. Raises
        QuotaExceeded or QuotaUnavailable at the deadline."""
        if waiter.is_done:
            return
        end = self._ends[waiter] = asyncio.get_running_loop().create_future()
        self._wake.set()
        try:
            patience = 0.0 if self._is_away else deadline - time.monotonic()
            await asyncio.wait([end], timeout=max(0.0, patience))
        except asyncio.CancelledError:
            self._abandon(waiter)
            raise
        finally:
            del self._ends[waiter]
        if not waiter.is_done:
            unfollowed = next((hold for hold in waiter.holds if hold.quota.recall), None)
            self._book.leave(waiter)
            if unfollowed is not None:
                raise self._remember_refusal(unfollowed)
            raise QuotaUnavailable("Limits cannot be checked at the moment.")

    def _abandon(self, waiter: Waiter) -> None:
        if not waiter.is_done:
            self._book.leave(waiter)
        elif waiter.is_served:
            for hold in waiter.holds:
                self._book.settle(hold, 0)

    def _end(self, waiters: Sequence[Waiter]) -> None:
        for waiter in waiters:
            end = self._ends.get(waiter)
            if end is not None and not end.done():
                end.set_result(None)

    async def _listen(self) -> None:
        def hear(recall: LeaseRecall) -> None:
            self._book.hear(recall)
            self._wake.set()

        while True:
            try:
                return await self._renewal.listen(hear)
            except ApiError as error:
                log.warning("listening for recalls of leases failed: %s", error)
                await asyncio.sleep(SWEEP_INTERVAL_S)
