"""The images on the host, of all base models, bounded in bytes: who holds most for its weight makes
room, with what is worth least."""

from __future__ import annotations

from adapters.pool.image import AdapterImage
from adapters.pool.tiers import Entry, Holder
from memory.accounts import Accounts, Ask, BytesHeld
from memory.errors import require


class HostTier:
    """Holds `Entry.image`; nobody else sets it."""

    def __init__(self, max_bytes: int, accounts: Accounts) -> None:
        self.max_bytes = max_bytes
        self._accounts = accounts
        self._entries: dict[Entry, None] = {}
        self.num_bytes = 0

    def put(self, entry: Entry, image: AdapterImage) -> None:
        """There must be room, once the image that it replaces is gone."""
        self.drop(entry)
        entry.image = image
        self._entries[entry] = None
        self.num_bytes += image.num_bytes

    def drop(self, entry: Entry) -> None:
        """Its image, if it has one."""
        if entry.image is not None:
            del self._entries[entry]
            self.num_bytes -= entry.image.num_bytes
            entry.image = None

    def victims(self, entry: Entry) -> list[Entry] | None:
        """Whose images must leave for that of this one, of `image_bytes`. None: they do not give
        way, are worth more or are being copied.

        A few more go than must, so that not every arrival pays for the search.
        """
        missing = self.num_bytes + entry.image_bytes - self.max_bytes
        if missing <= 0:
            return []
        ask = self._ask(entry)
        own = self._worth_per_byte(entry, ask)
        worth = {e: self._worth_per_byte(e, ask) for e in self._entries if e.loading is None}
        victims: list[Entry] = []
        wanted = missing + self.max_bytes // 128
        for other in sorted(worth, key=worth.__getitem__):
            if wanted <= 0 or worth[other] > own:
                break
            if ask.may_take(other.account):
                victims.append(other)
                missing -= other.image_bytes
                wanted -= other.image_bytes
        return victims if missing <= 0 else None

    def _ask(self, entry: Entry) -> Ask:
        """What somebody waits for may displace anything, if nothing else of the account is waited
        for or on its way."""
        bytes_held = BytesHeld(self._accounts, ((e.account, e.image_bytes) for e in self._entries))
        own = (e for e in self._entries if e.account == entry.account and e is not entry)
        is_first = _is_awaited(entry) and not any(e.loading or _is_awaited(e) for e in own)
        return Ask(bytes_held, entry.account, entry.image_bytes, is_first=is_first)

    def _worth_per_byte(self, entry: Entry, ask: Ask) -> tuple[bool, float, float]:
        is_awaited, cost_s = entry.holder.host_worth(entry)
        return is_awaited, ask.priority(entry.account), cost_s / entry.image_bytes

    def check_integrity(self, holder: Holder, entries: list[Entry]) -> None:
        """Raises IntegrityError unless the images of all entries of the holder are here, and all
        that is here is within the bound."""
        on_host = {entry for entry in entries if entry.image is not None}
        here = {entry for entry in self._entries if entry.holder is holder}
        require(on_host == here, f"{len(on_host)} images, {len(here)}")
        num_bytes = sum(entry.image.num_bytes for entry in self._entries if entry.image is not None)
        require(num_bytes == self.num_bytes, f"{num_bytes} host bytes, not {self.num_bytes}")
        require(num_bytes <= self.max_bytes, f"{num_bytes} host bytes of {self.max_bytes}")


def _is_awaited(entry: Entry) -> bool:
    return entry.holder.host_worth(entry)[0]
