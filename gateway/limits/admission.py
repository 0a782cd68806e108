"""Admission of a request: its limits are reserved before it runs and settled when it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from admin.body_budget import HeldBody
from gateway.catalog.catalog import CatalogView
from gateway.catalog.principal import Principal
from gateway.exceptions import ApiError, QuotaUnavailable
from gateway.limits.bounds import completion_tokens
from gateway.limits.leases import Leases
from gateway.limits.quota import Hold
from gateway.limits.refusal_limit import RefusalLimit
from gateway.limits.request_charge import RequestCharge
from gateway.quota_types import Cost, Kind, Limit, Tariff, leased_bits

AT_ONCE = 1024
"""Completion tokens that a choice reserves at a time: small enough to leave room for others, large
enough that a renewal is rarely waited for."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens that a request took. Each prompt counts once, however many choices it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    thought_tokens: int = 0
    """Completion tokens that spell thoughts."""


class Part(msgspec.Struct, frozen=True):
    """Holds that were reserved together, and the tokens that they cover."""

    prompt_tokens: int
    completion_tokens: int
    holds: list[Hold]


class Reservation:
    """What one request has reserved. Completion tokens are promised some at a time: more is
    reserved well before they are used up, and where that is refused the answer ends."""

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
        """`max_tokens` has one entry a prompt, which each of its `num_choices` may take."""
        self.max_tokens = max_tokens
        self.admitted_at = time.time() if leases is None else leases.clock()
        self.holder = "" if leases is None else leases.holder
        """The holder of the leases that all of it is reserved from."""
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
        """Raises QuotaExceeded or QuotaUnavailable; then nothing is taken."""
        if self._limits:
            await self._reserve(self._prompt_tokens, self._step)

    def give(self, num_tokens: int) -> int:
        """How many of these completion tokens are within what is promised."""
        if not self._limits:
            return num_tokens
        given = min(num_tokens, self._promised - self._given)
        self._given += given
        left = self._promised - self._given
        if self._promised < self._most and left < self._ask_below and self._extending is None:
            self._extending = asyncio.create_task(self._extend(left))
        return given

    def metered(self, usage: Usage) -> int:
        """Tokens as quotas count them."""
        return self._tariff.metered(
            usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        )

    def cost(self, usage: Usage) -> Cost:
        return self._tariff.cost(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)

    def settle(self, usage: Usage) -> None:
        """Exactly once."""
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
        """By one step."""
        more = min(self._step, self._most - self._promised)
        try:
            await self._reserve(0, more)
        except ApiError:
            # Asked again when half of what is left is used, for others may have ended by then.
            self._ask_below = left // 2
        self._extending = None

    async def _reserve(self, prompt: int, completion: int) -> None:
        assert self._leases is not None
        wanted = [
            (limit, self._tariff.promise(limit.kind, prompt, completion)) for limit in self._limits
        ]
        holds = await self._leases.take(wanted, self.admitted_at)
        if self.holder != self._leases.holder:
            if self._parts:
                # What is used leaves the leases of one holder, and those are lost.
                for hold in holds:
                    self._leases.settle(hold, 0)
                raise QuotaUnavailable("The leases of limits were lost meanwhile.")
            self.holder = self._leases.holder
        self._parts.append(Part(prompt, completion, holds))
        self._promised += completion


class Admission:
    def __init__(self, leases: Leases | None, refusals: RefusalLimit) -> None:
        """Without leases nothing that has a limit is admitted."""
        self.num_open = 0
        """Reservations not settled yet."""
        self._leases = leases
        self._refusals = refusals

    def charge(self, view: CatalogView, caller: Principal, body: HeldBody) -> RequestCharge:
        """The caller's charge for a request with this body, nothing of it taken yet. Raises
        QuotaUnavailable."""
        limits = self._limits_of(view, caller)
        return RequestCharge(self._leases, limits, self._refusals, caller.tenant.id, body)

    async def reserve(
        self,
        view: CatalogView,
        caller: Principal,
        model: str,
        prompt_lengths: list[int],
        *,
        asked_tokens: int | None,
        default_tokens: int,
        num_choices: int,
        max_model_len: int,
    ) -> Reservation:
        """Reserves tokens and money. Raises ContextLengthExceeded if a prompt with its answer
        cannot fit, QuotaExceeded, QuotaUnavailable; then nothing is taken."""
        limits = self._limits_of(view, caller)
        reservation = Reservation(
            self._leases,
            [limit for limit in limits if not limit.kind.counts_requests],
            view.tariff(model, caller.tenant.id),
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

    def _limits_of(self, view: CatalogView, caller: Principal) -> Sequence[Limit]:
        limits = view.limits_of(caller.tenant.id, caller.key.quota_subject)
        if limits and self._leases is None:
            raise QuotaUnavailable("Limits cannot be checked without a database.")
        return limits

    def settle(self, reservation: Reservation, usage: Usage) -> None:
        """Exactly once for each reservation."""
        self.num_open -= 1
        reservation.settle(usage)
