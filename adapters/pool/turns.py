"""Decides which adapter is loaded for a waiting sequence, and on which adapter no sequence starts,
so that it can be evicted.

    no room --(patience ends)--> starving: its victim starts no sequences
            --(the victim's last sequence ends)--> loaded

An adapter that finds no room is skipped until its patience ends, which is the promised time to
first token. Then the adapter starves and gets a victim: the adapter in use whose sequences end
soonest. An adapter of a tenant that was charged less than the starving adapter's tenant becomes a
victim only if there is no other. No sequence starts on a victim. While there are victims, only
their starving adapters may load, and adapters of tenants that were charged less than the starving
adapters' tenants. So the longest wait of an adapter for room, while its tenant is charged no more
than others, is its patience plus, for each victim that it needs, the time until the victim's last
sequence ends. The adapter that has starved longest gets its victim first.

If no adapter is or can be a victim, the pages of running sequences fill the memory. Then only
sequences of adapters that lack room start, until enough running sequences have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from adapters.pool.source import AdapterLease, AdapterTurn, AdapterUse, Charge, Loading, NoRoom
from adapters.reference import AdapterRef
from memory.accounts import Tenant, Turn

MAX_ASKED, MAX_ASKERS = 32, 128
"""Maximum number of adapters that are requested in one step while they are not on the device, and
maximum number including the first one of each further tenant. A request takes 15 us."""


Answer = AdapterLease | Loading | NoRoom
Acquire = Callable[[Tenant, Turn], Answer]
"""Function that leases an adapter, or starts to load it for the tenant. Its second argument is the
place of the request among the tenant's requests."""


@dataclass(slots=True)
class Lack:
    """Adapter that lacks room, with the newest turn that requested it, of a step's turns the first.
    starves_at_s: time at which it begins to starve."""

    ref: AdapterRef
    turn: AdapterTurn
    starves_at_s: float


class AdapterTurns:
    """Turns of the adapters that waiting sequences request, and the victims of starving adapters.
    Adapters are identified by digest."""

    def __init__(
        self,
        missing_bytes: Callable[[AdapterRef], int | None],
        may_displace: Callable[[AdapterRef, str], bool],
    ) -> None:
        """missing_bytes: see `AdapterPool.missing_bytes`. may_displace: whether the adapter with
        the given digest, once idle, would be evicted for the first one."""
        self._missing_bytes = missing_bytes
        self._may_displace = may_displace
        self._now = 0.0
        self._asked: set[str] = set()
        """Digests of the adapters that were requested in this step and are not on the device."""
        self._askers: set[str] = set()
        """Names of the tenants for which these adapters were requested."""
        self._turned: set[str] = set()
        """Digests of all adapters that sequences needed in this step."""
        self._lacking: dict[str, Lack] = {}
        self._victims: dict[str, str] = {}
        """Victim of each starving adapter. No sequence may start on a victim."""
        self._charged_least: Charge = (0.0, 0.0)
        """Lowest charge of the tenants whose starving adapters have victims."""
        self.lacks_pages = False
        """Whether running sequences must free pages, because a starving adapter lacks memory, no
        adapter can be its victim, and no other starving adapter has a victim."""

    @property
    def is_open(self) -> bool:
        """Whether any adapter may be loaded and any sequence may start."""
        return not self._victims and not self.lacks_pages

    def begin(self, now: float, in_use: Iterable[AdapterUse]) -> None:
        """Chooses victims for adapters that have begun to starve, or that still lack room although
        their victim is no longer in use."""
        self._now = now
        self._asked.clear()
        self._askers.clear()
        self._turned.clear()
        self.lacks_pages = False
        if starving := [each for each in self._lacking.values() if each.starves_at_s <= now]:
            starving.sort(key=lambda each: (each.starves_at_s, each.ref.digest))
            self._choose_victims(starving, list(in_use))

    def acquire(self, ref: AdapterRef, turn: AdapterTurn, acquire: Acquire) -> Answer:
        """Calls `acquire` and returns its answer if the adapter may be loaded or leased now and was
        not requested in this step yet. Otherwise returns Loading."""
        digest, tenant = ref.digest, turn.tenant.name
        lack = self._lacking.get(digest)
        if lack is not None and digest not in self._turned:
            lack.turn = turn
        self._turned.add(digest)
        if digest in self._asked or not self._may_start(digest):
            return Loading()
        may_ask = len(self._asked) < (MAX_ASKED if tenant in self._askers else MAX_ASKERS)
        if (
            not (may_ask and self._may_load(digest, turn.account.charge))
            and self._missing_bytes(ref) != 0
        ):
            return Loading()
        # The newest step's requests are first, in the policy's order.
        answer = acquire(turn.tenant, (-self._now, len(self._asked)))
        if isinstance(answer, AdapterLease):
            self.forget(digest)
            return answer
        self._asked.add(digest)
        self._askers.add(tenant)
        if isinstance(answer, NoRoom):
            starves_at_s = self._now + turn.patience_s
            if lack is not None:
                turn, starves_at_s = lack.turn, min(starves_at_s, lack.starves_at_s)
            self._lacking[digest] = Lack(ref, turn, starves_at_s)
        return answer

    def forget(self, digest: str) -> None:
        """Ends the adapter's starvation. Called when the adapter is leased, or when no sequence
        waits for it."""
        self._lacking.pop(digest, None)
        self._victims.pop(digest, None)

    def _may_load(self, digest: str, charge: Charge) -> bool:
        """Whether the adapter may be loaded. While there are victims, only their starving adapters
        may be loaded, and those of tenants that were charged less than theirs. While sequences must
        free pages, only adapters that lack room may."""
        if self.lacks_pages:
            return digest in self._lacking
        return not self._victims or digest in self._victims or charge < self._charged_least

    def _may_start(self, digest: str) -> bool:
        """Whether a sequence with this adapter may start."""
        if self.lacks_pages:
            return digest in self._lacking
        return digest not in self._victims.values()

    def _choose_victims(self, starving: list[Lack], uses: list[AdapterUse]) -> None:
        in_use: dict[str, tuple[Charge, int]] = {}
        """Smallest charge of the accounts that use each adapter, and the largest number of tokens
        that one of its sequences may still generate."""
        for other, account, num_left in uses:
            if other is not None:
                least, most = in_use.get(other, (account.charge, 0))
                in_use[other] = min(least, account.charge), max(most, num_left)
        self._victims = {
            digest: victim for digest, victim in self._victims.items() if victim in in_use
        }
        for lack in starving:
            digest, charge = lack.ref.digest, lack.turn.account.charge
            if digest in self._victims:
                continue
            taken = {*self._victims, *self._victims.values()}
            free = {
                other: (least < charge, num_left, other)
                for other, (least, num_left) in in_use.items()
                if other not in taken and self._may_displace(lack.ref, other)
            }
            if free:
                self._victims[digest] = min(free, key=free.__getitem__)
            elif uses and not self._victims:
                self.lacks_pages |= bool(self._missing_bytes(lack.ref))
        charges = (self._lacking[digest].turn.account.charge for digest in self._victims)
        self._charged_least = min(charges, default=(0.0, 0.0))
