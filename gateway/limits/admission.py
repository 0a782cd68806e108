"""Admits requests. Charges a request before its body is read, reserves tokens and money before it
runs, and replaces these reservations by the actual usage when it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from gateway.catalog.catalog import Principal
from gateway.exceptions import QuotaUnavailable
from gateway.limits.bounds import completion_tokens
from gateway.limits.leases import Leases
from gateway.limits.quota import Hold
from gateway.limits.rate_headers import is_shown
from gateway.limits.tenant_load import RefusalLimit
from gateway.quota_types import Cost, Kind, Limit, Tariff, leased_bits
from store.errors import ApiError
from store.records import Price
from web.held_bytes import HeldBody

log = logging.getLogger(__name__)
AT_ONCE = 1024
"""Number of completion tokens that a choice reserves at a time. It is small enough to leave room
for other requests, and large enough that answers rarely wait for a renewal of leases."""


class RequestCharge:
    """Charge of one client request. Counts the request against the limits of requests per minute,
    of concurrent requests if a worker runs it, and of refused requests if it is refused."""

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
        """Number of bytes passed to RefusalLimit.begin. None before that call, and after
        RefusalLimit.end was called."""

    async def take(self, num_bytes: int, *, on_worker: bool) -> None:
        """Charges the request to the tenant's limits. If `on_worker` is set, also counts the
        request against the limits of concurrent requests, and raises if a limit of tokens or money
        is used up. `num_bytes` is the size of the body, as far as it is known. Raises
        TooManyRefusals, QuotaExceeded or QuotaUnavailable."""
        self._body.on_unread = partial(self._refusals.add_unread, self._tenant_id)
        self._refusals.begin(self._tenant_id, num_bytes)
        self._num_begun = num_bytes
        try:
            if self._leases is not None and self._limits:
                await self._take_from(self._leases, on_worker=on_worker)
        except BaseException:
            # The limit of refusals bounds the bytes of refused bodies that are read. This body has
            # not been read, so it does not count.
            self._end_refusal(None)
            raise

    def settle(self, status: int, is_ours: bool) -> dict[str, str]:
        """Settles the charge against the limits of requests per minute. Called when the answer
        begins, with the answer's HTTP status. If `is_ours` is set, the server caused the failure,
        and the request is not charged. Returns the headers that report the caller's limits."""
        self._settle_requests(0 if is_ours else 1)
        self._end_refusal(self._body.num_read if status >= 400 else None)
        return self._headers()

    def end(self) -> None:
        """Ends the charge against the limits of concurrent requests. Called when the request has
        ended. If the client disconnected before the answer began, the request stays charged against
        the limits of requests per minute."""
        self._settle_requests(1)
        self._end_refusal(None)
        slots, self._slots = self._slots, ()
        for slot in slots:
            self._settle(slot, 0)

    def _headers(self) -> dict[str, str]:
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
        """Ends the request in RefusalLimit. Calls after the first have no effect."""
        num_begun, self._num_begun = self._num_begun, None
        if num_begun is not None:
            self._refusals.end(self._tenant_id, num_begun, num_refused_bytes)

    def _settle_requests(self, used: int) -> None:
        """Settles the holds on requests per minute, with `used` as the amount used. Calls after the
        first have no effect."""
        requests, self._requests = self._requests, ()
        for hold in requests:
            self._settle(hold, used)

    def _settle(self, hold: Hold, used: int) -> None:
        assert self._leases is not None
        self._leases.settle(hold, used)


class Usage(msgspec.Struct, frozen=True):
    """Tokens that a request used. Each prompt counts once, even if it has several choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    thought_tokens: int = 0
    """Number of completion tokens that belong to thoughts."""


class Part(msgspec.Struct, frozen=True):
    """Amounts that a request has reserved in one step: one hold for each limit, and the numbers of
    prompt and completion tokens that these holds cover."""

    prompt_tokens: int
    completion_tokens: int
    holds: list[Hold]


class Reservation:
    """Amounts that one request has reserved from its limits. Completion tokens are reserved in
    steps, and each step is requested well before the previous step is used up. If a step is
    refused, the answer ends when the tokens reserved so far are used up."""

    def __init__(
        self,
        leases: Leases | None,
        limits: Sequence[Limit],
        tariff: Tariff,
        *,
        tenant_id: str,
        prompt_tokens: int,
        max_tokens: list[int],
        num_choices: int,
    ) -> None:
        """`max_tokens` has one entry for each prompt: the maximum number of completion tokens of
        each of its `num_choices` choices."""
        self.max_tokens = max_tokens
        self.admitted_at = time.time() if leases is None else leases.clock()
        self.holder = "" if leases is None else leases.holder
        """Holder id of the leases from which all parts are reserved."""
        self.leased = leased_bits(tenant_id, limits)
        self._leases = leases
        self._limits = limits
        self._tariff = tariff
        self._prompt_tokens = prompt_tokens
        self._most = sum(max_tokens) * num_choices
        self._step = min(self._most, AT_ONCE * num_choices * len(max_tokens))
        self._promised = 0
        self._given = 0
        self._ask_below = self._step // 2
        self._parts: list[Part] = []
        self._extending: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Reserves the tokens of the prompts and the first step of completion tokens. Raises
        QuotaExceeded or QuotaUnavailable, in which case nothing is reserved."""
        if self._limits:
            await self._reserve(self._prompt_tokens, self._step)

    def give(self, num_tokens: int) -> int:
        """Uses up to `num_tokens` of the reserved completion tokens, and returns how many it has
        used. Starts to reserve the next step when few tokens are left."""
        if not self._limits:
            return num_tokens
        given = min(num_tokens, self._promised - self._given)
        self._given += given
        left = self._promised - self._given
        if self._promised < self._most and left < self._ask_below and self._extending is None:
            self._extending = asyncio.create_task(self._extend(left))
        return given

    def metered(self, usage: Usage) -> int:
        """Returns the number of tokens that count against quotas."""
        return self._tariff.metered(
            usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        )

    def cost(self, usage: Usage) -> Cost:
        return self._tariff.cost(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)

    def settle(self, usage: Usage) -> None:
        """Replaces the reserved amounts by the actual usage. Must be called exactly once."""
        if self._extending is not None:
            self._extending.cancel()
        metered, cost = self.metered(usage), sum(self.cost(usage))
        for part in self._parts:
            assert self._leases is not None
            metered_here = min(metered, part.prompt_tokens + part.completion_tokens)
            cost_here = min(
                cost,
                self._tariff.promise(
                    Kind.SPEND_PER_DAY, part.prompt_tokens, part.completion_tokens
                ),
            )
            metered -= metered_here
            cost -= cost_here
            for hold in part.holds:
                used = cost_here if hold.quota.kind.counts_money else metered_here
                self._leases.settle(hold, used)
        self._parts.clear()

    async def _extend(self, left: int) -> None:
        """Reserves the next step. `left` is the number of reserved tokens that are not used yet."""
        more = min(self._step, self._most - self._promised)
        try:
            await self._reserve(0, more)
        except ApiError:
            # Reserving is retried when half of the tokens left are used, because other requests may
            # have ended by then.
            self._ask_below = left // 2
        except Exception:
            log.exception("extending a reservation failed")
            self._ask_below = left // 2
        finally:
            self._extending = None

    async def _reserve(self, prompt: int, completion: int) -> None:
        assert self._leases is not None
        wanted = [
            (limit, self._tariff.promise(limit.kind, prompt, completion)) for limit in self._limits
        ]
        holds = await self._leases.take(wanted, self.admitted_at)
        if self.holder != self._leases.holder:
            if self._parts:
                # A request's usage is deducted from the leases of one holder id. The leases of the
                # earlier parts' id are lost, so this request cannot reserve more.
                for hold in holds:
                    self._leases.settle(hold, 0)
                raise QuotaUnavailable("The leases of limits were lost meanwhile.")
            self.holder = self._leases.holder
        self._parts.append(Part(prompt, completion, holds))
        self._promised += completion


class Admission:
    def __init__(self, leases: Leases | None, refusals: RefusalLimit) -> None:
        """`leases` is None if the gateway has no database. Requests of tenants or keys with limits
        are then refused."""
        self.num_open = 0
        """Number of reservations that are not settled yet."""
        self._leases = leases
        self._refusals = refusals

    def charge(self, caller: Principal, body: HeldBody) -> RequestCharge:
        """Returns the charge for a request with this body. Nothing is charged until
        RequestCharge.take is called. Raises QuotaUnavailable if the caller has limits and there is
        no database."""
        if caller.limits and self._leases is None:
            raise QuotaUnavailable("Limits cannot be checked without a database.")
        return RequestCharge(self._leases, caller.limits, self._refusals, caller.tenant.id, body)

    async def reserve(
        self,
        caller: Principal,
        price: Price,
        prompt_lengths: list[int],
        *,
        asked_tokens: int | None,
        default_tokens: int,
        num_choices: int,
        max_model_len: int,
    ) -> Reservation:
        """Reserves tokens and money for a request that `charge` has accepted. Raises
        ContextLengthExceeded if a prompt and its answer do not fit the context, QuotaExceeded if a
        limit has no room, and QuotaUnavailable if limits cannot be checked. Reserves nothing if it
        raises."""
        reservation = Reservation(
            self._leases,
            [limit for limit in caller.limits if not limit.kind.counts_requests],
            Tariff(price, caller.cached_weight),
            tenant_id=caller.tenant.id,
            prompt_tokens=sum(prompt_lengths),
            max_tokens=[
                completion_tokens(length, asked_tokens, default_tokens, max_model_len)
                for length in prompt_lengths
            ],
            num_choices=num_choices,
        )
        await reservation.begin()
        self.num_open += 1
        return reservation

    def settle(self, reservation: Reservation, usage: Usage) -> None:
        """Settles a reservation. Must be called exactly once for each reservation."""
        self.num_open -= 1
        reservation.settle(usage)
