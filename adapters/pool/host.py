"""Host memory for the images of all base models, bounded in bytes. Images are dropped from the
tenant's account that holds the most bytes relative to its weight, the least valuable first."""

from __future__ import annotations

from collections.abc import Callable

from adapters.pool.packed_image import AdapterImage
from adapters.pool.tiers import AdapterEntry
from memory.accounts import Accounts, Ask, Holdings
from memory.bounded_items import BoundedItems
from memory.errors import require

SHADOW = 0.1
"""Factor on the value of a host image while the adapter is also on the device. The image then only
speeds up a reload after an eviction from the device."""


class HostTier:
    """Images in host memory. Owns `AdapterEntry.image`, which no other class sets."""

    def __init__(self, max_bytes: int, accounts: Accounts, *, clock: Callable[[], float]) -> None:
        self._accounts = accounts
        self.images = BoundedItems[AdapterEntry](max_bytes, lambda entry: _loss_s(entry, clock()))

    def put(self, entry: AdapterEntry, image: AdapterImage) -> None:
        """Stores the image, replacing the entry's previous one. There must be room."""
        entry.image = image
        self.images.put(entry, image.num_bytes)

    def drop(self, entry: AdapterEntry) -> None:
        """Drops the entry's image, if it has one."""
        self.images.drop(entry)
        entry.image = None

    def victims(self, entry: AdapterEntry) -> list[AdapterEntry] | None:
        """Returns the entries whose images must be dropped so that the image of `entry` fits.
        Chooses only images that are not being copied, are worth no more than the entry's image, and
        may be evicted for the entry's account. Returns None if they free too few bytes."""
        if self.images.has_room(entry.image_bytes):
            return []
        ask = self._ask(entry)

        def rank(other: AdapterEntry) -> tuple[bool, float]:
            return other.needs_copy, ask.priority([other.account])

        own = rank(entry), self.images.loss(entry, entry.image_bytes)
        return self.images.victims(
            entry.image_bytes,
            rank=rank,
            may_go=lambda other: (
                other.loading is None
                and (rank(other), self.images.loss(other, other.image_bytes)) <= own
                and ask.may_take([other.account])
            ),
        )

    def _ask(self, entry: AdapterEntry) -> Ask:
        """Returns the account's request for host memory for the entry's image. For an image
        that a caller or a pin waits to have copied to the device, images of any account may be
        evicted, unless the account has another such image on the host, or one that is loading."""
        bytes_held = Holdings(self._accounts, ((e.account, e.image_bytes) for e in self.images))
        own = (e for e in self.images if e.account == entry.account and e is not entry)
        is_first = entry.needs_copy and not any(e.loading or e.needs_copy for e in own)
        return Ask(bytes_held, entry.account, entry.image_bytes, is_first=is_first)

    def check_integrity(self, known: dict[str, AdapterEntry]) -> None:
        """Raises IntegrityError if the images that the tier stores for a pool differ from the
        images of the pool's entries, or if the images of all pools exceed the tier's maximum bytes.
        known: the pool's entries, by digest."""
        on_host = {entry for entry in known.values() if entry.image is not None}
        here = {entry for entry in self.images if entry.known is known}
        require(on_host == here, f"{len(on_host)} images, {len(here)}")
        self.images.check_integrity()


def _loss_s(entry: AdapterEntry, now: float) -> float:
    """Returns the cost of dropping the image: reload seconds times expected reuse."""
    is_on_disk = entry.far_tier(entry.digest) == "disk"
    cost = entry.cost.fetch_s(entry.image_bytes)
    cost += 0.0 if is_on_disk else entry.cost.build_s(entry.image_bytes)
    return cost * entry.reuse.expected(now) * (1.0 if entry.slot is None else SHADOW)
