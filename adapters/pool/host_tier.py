"""The images on the host, of all base models, bounded in bytes: the holder of most for its weight
makes room, with what is worth least."""

from __future__ import annotations

from adapters.pool.image import AdapterImage
from adapters.pool.tiers import AdapterEntry, Holder
from memory.accounts import Accounts, Ask, BytesHeld
from memory.errors import require
from memory.tier import Tier


class HostTier:
    """Holds `AdapterEntry.image`; no other class sets it."""

    def __init__(self, max_bytes: int, accounts: Accounts) -> None:
        self._accounts = accounts
        self._tier = Tier[AdapterEntry](max_bytes)

    @property
    def max_bytes(self) -> int:
        return self._tier.max_bytes

    def put(self, entry: AdapterEntry, image: AdapterImage) -> None:
        """There must be room, once the image that it replaces is gone."""
        self.drop(entry)
        entry.image = image
        self._tier.put(entry, image.num_bytes)

    def drop(self, entry: AdapterEntry) -> None:
        """Its image, if it has one."""
        self._tier.drop(entry)
        entry.image = None

    def victims(self, entry: AdapterEntry) -> list[AdapterEntry] | None:
        """Entries whose images must leave for that of this one, of `image_bytes`. None: too few
        give way, are worth as little, or are not being copied."""
        if self._tier.has_room(entry.image_bytes):
            return []
        ask = self._ask(entry)
        own = self._worth_per_byte(entry, ask)
        return self._tier.victims(
            entry.image_bytes,
            lambda other: self._worth_per_byte(other, ask),
            gives_way=lambda other, worth: (
                other.loading is None and worth <= own and ask.may_take(other.account)
            ),
        )

    def _ask(self, entry: AdapterEntry) -> Ask:
        """What a caller waits for may displace anything, if nothing else of the account is waited
        for or on its way."""
        bytes_held = BytesHeld(self._accounts, ((e.account, e.image_bytes) for e in self._tier))
        own = (e for e in self._tier if e.account == entry.account and e is not entry)
        is_first = _is_awaited(entry) and not any(e.loading or _is_awaited(e) for e in own)
        return Ask(bytes_held, entry.account, entry.image_bytes, is_first=is_first)

    def _worth_per_byte(self, entry: AdapterEntry, ask: Ask) -> tuple[bool, float, float]:
        is_awaited, cost_s = entry.holder.host_worth(entry)
        return is_awaited, ask.priority(entry.account), cost_s / entry.image_bytes

    def check_integrity(self, holder: Holder, entries: list[AdapterEntry]) -> None:
        """Raises IntegrityError unless the images of all entries of the holder are here, and all
        that is here is within the bound."""
        on_host = {entry for entry in entries if entry.image is not None}
        here = {entry for entry in self._tier if entry.holder is holder}
        require(on_host == here, f"{len(on_host)} images, {len(here)}")
        self._tier.check_integrity()


def _is_awaited(entry: AdapterEntry) -> bool:
    return entry.holder.host_worth(entry)[0]
