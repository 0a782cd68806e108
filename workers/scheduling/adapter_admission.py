"""An adapter that finds no room on the device is not passed over for ever: after a while another is
drained for it.

    short --(patience)--> starving: a victim takes no new sequences --(its last ends)--> loaded

The victim is of those in use the one that ends soonest, but a tenant that was charged less than the
one that waits is spared while others can be found. Sequences that end before the victim would
anyway may still begin on it. While anybody starves, only those may load anything: what becomes free
is theirs. So an adapter waits for room at most its patience and, for each victim it needs, the
longest sequence that runs on it; those that starve longer come first.

Where nobody uses an adapter, sequences of the base have all the memory: nobody begins then but
those that starve, until enough of what runs has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.scheduling.sequence import Sequence
    from workers.wire.protocol import AdapterRef


class AdapterTurns:
    """Adapters by digest."""

    def __init__(self) -> None:
        self._starves_at_s: dict[str, float] = {}
        """Those short of room."""
        self._victims: dict[str, tuple[str, int]] = {}
        """Starving adapter -> whom it waits for, and the steps that one may still need."""
        self._lacks_pages = False
        """One starves, and there is no victim: pages of sequences must come free."""
        self._waiting: defaultdict[str, dict[Sequence, None]] = defaultdict(dict)
        """Sequences, in the order of arrival."""

    @property
    def is_open(self) -> bool:
        """Nobody starves: any adapter may load."""
        return not self._victims and not self._lacks_pages

    def is_awaited(self, digest: str) -> bool:
        return digest in self._waiting

    def note_waiting(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            self._waiting[sequence.adapter.digest][sequence] = None

    def note_not_waiting(self, sequence: Sequence) -> None:
        if sequence.adapter is None:
            return
        digest = sequence.adapter.digest
        del self._waiting[digest][sequence]
        if not self._waiting[digest]:
            del self._waiting[digest]
            self.note_served(digest)

    def may_load(self, digest: str) -> bool:
        if self._lacks_pages:
            return digest in self._starves_at_s
        return not self._victims or digest in self._victims

    def may_start(self, sequence: Sequence, digest: str | None) -> bool:
        """Not on a victim, unless it ends before the victim would anyway. digest: None for the base
        model."""
        if self._lacks_pages:
            return digest in self._starves_at_s
        if not self._victims:
            return True
        limits = [limit for victim, limit in self._victims.values() if victim == digest]
        return not limits or num_left(sequence) <= min(limits)

    def note_short(self, sequence: Sequence, digest: str, now: float) -> None:
        """The sequence asked for its adapter, and there was no room."""
        due_s = now + sequence.terms.ttft_s
        self._starves_at_s[digest] = min(self._starves_at_s.get(digest, due_s), due_s)

    def note_served(self, digest: str) -> None:
        """It is there, or nobody waits for it any more."""
        self._starves_at_s.pop(digest, None)
        self._victims.pop(digest, None)

    def choose_victims(
        self,
        now: float,
        running: Iterable[Sequence],
        may_displace: Callable[[AdapterRef, str], bool],
        num_lacking: Callable[[AdapterRef], int],
    ) -> None:
        """For those that have begun to starve, or whose victim has ended without making enough
        room. may_displace: whether an adapter may have the room of another. num_lacking: bytes that
        it found no room for."""
        self._lacks_pages = False
        starving = sorted(
            (due_s, digest) for digest, due_s in self._starves_at_s.items() if due_s <= now
        )
        if not starving:
            return
        running = list(running)
        in_use = _in_use(running)
        for digest, (victim, limit) in list(self._victims.items()):
            if victim in in_use:
                self._victims[digest] = victim, min(limit - 1, in_use[victim][1])
            else:
                del self._victims[digest]
        for _, digest in starving:
            if digest in self._victims or digest not in self._waiting:
                continue
            taken = {victim for victim, _ in self._victims.values()}
            first = next(iter(self._waiting[digest]))
            assert first.adapter is not None
            free = {
                other: use
                for other, use in in_use.items()
                if other not in taken
                and other not in self._victims
                and may_displace(first.adapter, other)
            }
            if not free:
                must_wait = bool(running) and not self._victims
                self._lacks_pages |= must_wait and num_lacking(first.adapter) > 0
                continue
            charged = _charged(first)
            victim = min(free, key=lambda d: (free[d][0] < charged, free[d][1], d))
            self._victims[digest] = victim, free[victim][1]


def num_left(sequence: Sequence) -> int:
    """Tokens it may still generate."""
    return sequence.max_len - len(sequence.tokens)


def _charged(sequence: Sequence) -> tuple[float, float]:
    account = sequence.account
    return account.line.counter, account.counter


def _in_use(running: Iterable[Sequence]) -> dict[str, tuple[tuple[float, float], int]]:
    """Leased adapters: what the least charged of its tenants was charged, the most tokens left."""
    used: dict[str, tuple[tuple[float, float], int]] = {}
    for sequence in running:
        if sequence.adapter is not None:
            charged, left = _charged(sequence), num_left(sequence)
            if (other := used.get(sequence.adapter.digest)) is not None:
                charged, left = min(charged, other[0]), max(left, other[1])
            used[sequence.adapter.digest] = charged, left
    return used
