"""Loads adapters from tier to tier on threads, and records failed loads."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Protocol

from adapters.pool.device import DeviceTier
from adapters.pool.host import HostTier
from adapters.pool.load_cost import LoadCost
from adapters.pool.packed_image import AdapterImage
from adapters.pool.source import AdapterTier, AdapterUnavailable
from adapters.pool.tiers import AdapterEntry
from adapters.reference import AdapterSignature
from memory.errors import require
from memory.eviction.copy_queue import Copy, CopyQueue

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Seconds after a failed load until it may be retried."""
MAX_FAULTS = 256
"""Maximum number of remembered failures. A failure may outlive the adapter's entry in the pool."""


class ImageLoader(Protocol):
    """Loader of images to the host, implemented by `AdapterLoader`. Thread-safe."""

    def is_cached(self, digest: str) -> bool:
        """Whether the image is on disk."""
        ...

    def fetch(
        self, digest: str, proved: str, signed: AdapterSignature | None, *, keeps_file: bool
    ) -> AdapterImage:
        """Loads an adapter's packed image to the host. Raises AdapterUnavailable if that fails."""
        ...


@dataclass(slots=True)
class LoadCount:
    """Number of loads, and their total seconds, including the time in the queue."""

    number: int = 0
    seconds: float = 0.0


class Failures:
    """Failed loads. Owns `AdapterEntry.failure`. For status reports, keeps each adapter's last
    failure until a load of the adapter succeeds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._recent: deque[AdapterEntry] = deque()
        """Entries in the order in which they may be retried."""
        self._faults: OrderedDict[str, AdapterUnavailable] = OrderedDict()

    @property
    def faults(self) -> Mapping[str, AdapterUnavailable]:
        """Last failure of each adapter, by digest."""
        return self._faults

    def record(self, entry: AdapterEntry, error: BaseException) -> None:
        # A new error is stored, because the frames of the raised one would keep the files and the
        # image alive.
        if isinstance(error, AdapterUnavailable):
            error = AdapterUnavailable(error.code, str(error))
        else:
            error = AdapterUnavailable("adapter.load_failed", f"{type(error).__name__}: {error}")
        entry.failure = (error, self._clock() + RETRY_S)
        self._recent.append(entry)
        self._faults[entry.digest] = error
        self._faults.move_to_end(entry.digest)
        if len(self._faults) > MAX_FAULTS:
            self._faults.popitem(last=False)

    def record_success(self, entry: AdapterEntry) -> None:
        self._faults.pop(entry.digest, None)

    def recent(self, entry: AdapterEntry) -> AdapterUnavailable | None:
        """Returns the error of the adapter's last load if it failed and must not be retried yet.
        Otherwise returns None."""
        if entry.failure is not None and self._clock() >= entry.failure[1]:
            entry.failure = None
        return None if entry.failure is None else entry.failure[0]

    def due(self) -> Iterator[AdapterEntry]:
        """Removes and yields the entries whose failed loads may be retried."""
        while self._recent and self.recent(self._recent[0]) is None:
            yield self._recent.popleft()


class Loads:
    """Loads of one base model's adapters. A load has two stages: `loader` fetches the image to the
    host, which takes long if the store is slow, and then the image is copied to the device.

    fetcher, copier: executors, which `close` shuts down. The copier has one thread. The threads do
    not hold the lock while they load.
    """

    def __init__(
        self,
        loader: ImageLoader,
        host: HostTier,
        device: DeviceTier,
        *,
        lock: Lock,
        fetcher: Executor,
        copier: Executor,
        disk_bytes: int,
        clock: Callable[[], float],
        num_fetchers: int = 1,
    ) -> None:
        """lock: the memory lock. disk_bytes: maximum total bytes of the images on disk.
        num_fetchers: number of the fetcher's threads."""
        self._loader = loader
        self._host = host
        self.device = device
        self._clock = clock
        self.lock = lock
        self._fetches = CopyQueue[AdapterImage](fetcher, lock, num_threads=num_fetchers)
        self._copies = CopyQueue[AdapterImage](copier, lock)
        self._largest = {
            "device": device.placements.capacity_bytes,
            "host": host.images.max_bytes,
            "disk": disk_bytes,
        }
        """Maximum bytes of one adapter, by tier."""
        self.failures = Failures(clock)
        self.cost = LoadCost()
        self.counts = {"host": LoadCount(), "device": LoadCount()}
        """Finished loads since the start, by the tier to which the adapter was loaded."""
        self.num_failed = 0

    @property
    def num_open(self) -> int:
        """Number of queued and running loads."""
        return self._fetches.num_open + self._copies.num_open

    def far_tier(self, digest: str) -> AdapterTier:
        """Returns the tier, disk or store, of an adapter that is not on the host or device."""
        return "disk" if self._loader.is_cached(digest) else "store"

    def advance(self, entry: AdapterEntry) -> None:
        """Starts the next stage of the adapter's load: from disk or store to the host, or from the
        host to the device. Does nothing while a stage is running."""
        if entry.loading is not None or entry.slot is not None:
            return
        if entry.image is None:
            self.fetch(entry)
        elif self.device.is_here:
            copy = self.device.place(entry, entry.image)
            if copy is not None:
                entry.load_times.copy_begun_s = self._clock()
                self._submit(self._copies, entry, copy)

    def fetch(self, entry: AdapterEntry) -> None:
        """Starts to load the image to the host, unless it is already loading, a recent load failed,
        or the host is known to have no room for it."""
        if entry.loading is not None or self.failures.recent(entry) is not None:
            return
        if entry.image_bytes and self._host.victims(entry) is None:
            return
        asked = entry.digest, entry.proved, entry.signed
        work = partial(self._loader.fetch, *asked, keeps_file=not entry.is_ephemeral)
        entry.load_times.source = self.far_tier(entry.digest)
        entry.load_times.fetch_begun_s = self._clock()
        self._submit(self._fetches, entry, work)

    def cancel(self, entry: AdapterEntry) -> None:
        """Cancels the entry's load unless it has started."""
        queue = self._fetches if entry.slot is None else self._copies
        if entry.loading is not None and queue.cancel(entry.loading):
            entry.loading = None
            self.device.free(entry)

    def unload(self, entry: AdapterEntry) -> None:
        """Drops the adapter's image from the host and the device. The adapter must be neither
        leased nor loading."""
        self._host.drop(entry)
        self.device.free(entry)

    def close(self) -> None:
        """Waits for running loads. Called without the lock."""
        self._fetches.close()
        self._copies.close()

    def check_integrity(self, known: dict[str, AdapterEntry]) -> None:
        """Raises IntegrityError unless the queues contain exactly the entries' loads, and both
        tiers agree with the entries."""
        self._host.check_integrity(known)
        self.device.check_integrity(known.values())
        loading = [entry for entry in known.values() if entry.loading is not None]
        num_copies = sum(entry.slot is not None for entry in loading)
        require(num_copies == self._copies.num_open, f"{num_copies} copies")
        num_fetches = len(loading) - num_copies
        require(num_fetches == self._fetches.num_open, f"{num_fetches} fetches")

    def _submit(
        self, queue: CopyQueue[AdapterImage], entry: AdapterEntry, work: Callable[[], AdapterImage]
    ) -> None:
        def timed_work() -> AdapterImage:
            begun_s = self._clock()
            image = work()
            entry.load_times.work_s = self._clock() - begun_s
            return image

        finish = partial(self._finish, entry, self._clock())
        entry.loading = Copy(timed_work, finish, entry.turns)
        queue.submit(entry.loading)

    def _finish(
        self, entry: AdapterEntry, asked_s: float, image: AdapterImage | BaseException
    ) -> None:
        """Records the end of a fetch or copy."""
        entry.loading = None
        if isinstance(image, BaseException):
            self._fail(entry, image)
            return
        source = entry.load_times.source if entry.slot is None else "host"
        self.cost.record(source, image.num_bytes, entry.load_times.work_s)
        count = self.counts["host" if entry.slot is None else "device"]
        count.number += 1
        count.seconds += self._clock() - asked_s
        try:
            self._store(entry, image)
        except Exception as error:
            # The load counts as failed, so that a slot that is only half written is never leased.
            log.exception("loading adapter %s failed", entry.digest)
            self._fail(entry, error)

    def _store(self, entry: AdapterEntry, image: AdapterImage) -> None:
        entry.image_bytes = image.num_bytes
        tier = min(self._largest, key=lambda tier: self._largest[tier])
        ends = image.tables.factor_ends(image.num_bytes)
        if image.num_bytes > self._largest[tier] or not self.device.placements.could_hold(ends):
            message = f"{image.num_bytes} bytes, the {tier} tier has {self._largest[tier]}"
            self._fail(entry, AdapterUnavailable("adapter.too_large", message))
            return
        self.failures.record_success(entry)
        entry.checksum = image.checksum
        if entry.slot is None:
            self._store_on_host(entry, image)
            return
        self._host.put(entry, image)
        if self.device.is_here:
            self.device.serve(entry, image)
            entry.load_times.copied_s = self._clock()
        else:
            self.device.free(entry)

    def _store_on_host(self, entry: AdapterEntry, image: AdapterImage) -> None:
        """Stores a fetched image on the host, or drops the image if there is no room. After a
        drop, callers must request the adapter again."""
        entry.load_times.fetched_s = self._clock()
        victims = self._host.victims(entry)
        if victims is None:
            entry.forget()
            return
        for victim in victims:
            self._host.drop(victim)
            victim.forget()
        self._host.put(entry, image)
        if entry.is_awaited:
            self.advance(entry)

    def _fail(self, entry: AdapterEntry, error: BaseException) -> None:
        self.num_failed += 1
        self.failures.record(entry, error)
        self.unload(entry)
