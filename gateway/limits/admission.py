"""Admits requests: reserves tokens and money from the limits before a request runs, and settles
them with the actual usage when it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import msgspec

from gateway.catalog.catalog import CatalogView
from gateway.catalog.principal import Principal
from gateway.exceptions import QuotaUnavailable
from gateway.limits.bounds import completion_tokens
from gateway.limits.leases import Leases
from gateway.limits.quota import Hold
from gateway.limits.refusal_limit import RefusalLimit
from gateway.limits.request_charge import RequestCharge
from gateway.quota_types import Cost, Kind, Limit, Tariff, leased_bits
from store.errors import ApiError
from web.body_budget import HeldBody

log = logging.getLogger(__name__)

AT_ONCE = 1024
"""Number of completion tokens that a choice reserves at a time. Few enough to leave room for other
requests, and enough that answers rarely have to wait for a renewal of leases."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens that a request used. Each prompt counts once, even if it has several choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    thought_tokens: int = 0
    """Number of completion tokens that belong to thoughts."""


class Part(msgspec.Struct, frozen=True):
    """Part of a reservation: holds on limits that were reserved together, and the tokens that they
    cover."""

    prompt_tokens: int
    completion_tokens: int
    holds: list[Hold]


class Reservation:
    """Amounts that one request has reserved from its limits. Completion tokens are reserved in
    steps, the next one well before the last one is used up. If the next step is refused, the answer
    ends when the tokens reserved so far are used up."""

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
        """Reserves the prompts and the first step of completion tokens, or nothing. Raises
        QuotaExceeded or QuotaUnavailable."""
        if self._limits:
            await self._reserve(self._prompt_tokens, self._step)

    def give(self, num_tokens: int) -> int:
        """Uses up to `num_tokens` reserved completion tokens, and returns how many of them were
        reserved. Starts to reserve the next step when few tokens are left."""
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
            # Retried when half of the tokens left are used, because other requests may have ended
            # by then.
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
                # A request's usage is deducted from the leases of one holder, and the leases of the
                # holder of the earlier parts have been lost.
                for hold in holds:
                    self._leases.settle(hold, 0)
                raise QuotaUnavailable("The leases of limits were lost meanwhile.")
            self.holder = self._leases.holder
        self._parts.append(Part(prompt, completion, holds))
        self._promised += completion


class Admission:
    def __init__(self, leases: Leases | None, refusals: RefusalLimit) -> None:
        """`leases` is None without a database. Requests that have limits are then refused."""
        self.num_open = 0
        """Number of reservations that are not settled yet."""
        self._leases = leases
        self._refusals = refusals

    def charge(self, view: CatalogView, caller: Principal, body: HeldBody) -> RequestCharge:
        """Returns the charge for a request with this body. Nothing is charged until
        RequestCharge.take is called. Raises QuotaUnavailable if the caller has limits and there is
        no database."""
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
        """Reserves tokens and money for a request. Raises ContextLengthExceeded if a prompt and its
        answer do not fit the context, QuotaExceeded if a limit has no room, and QuotaUnavailable if
        limits cannot be checked. Reserves nothing if it raises."""
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
        """Settles a reservation. Must be called exactly once for each."""
        self.num_open -= 1
        reservation.settle(usage)
