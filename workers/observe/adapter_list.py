"""List of a worker's adapters for its status, which is bounded however many adapters there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

from adapters.pool.host import HostTier
from adapters.pool.pool import AdapterPool
from adapters.pool.source import AdapterUnavailable
from adapters.pool.tiers import AdapterEntry
from workers.wire.status import AdapterStatus

MAX_ADAPTERS = 2000
"""Maximum number of adapters in a status, which then has about a megabyte. Each gateway receives a
status every second."""
MAX_FAILED = 256
"""Maximum number of adapters that are listed because their last load failed."""
MAX_TEXT = 256
"""Maximum length of an adapter's name and of an error message in a status."""


class AdapterList(NamedTuple):
    """Adapters of a worker. counts, num_bytes: totals by tier ("host", "device", "loading"), which
    include the adapters that are not listed."""

    adapters: list[AdapterStatus]
    num_unlisted: int
    counts: dict[str, int]
    num_bytes: dict[str, int]


def list_adapters(pools: Sequence[AdapterPool], host: HostTier) -> AdapterList:
    """Returns the adapters of all models of a worker. Beyond `MAX_ADAPTERS`, prefers adapters whose
    last load failed, then those on the device, those that requests wait for, and those that were
    loaded to the host last. Called with the memory lock held, for a bounded time."""
    num_known = sum(len(pool.entries) for pool in pools)
    near = _nearest(pools, host, is_whole=num_known <= MAX_ADAPTERS)
    failed: list[AdapterStatus] = []
    for pool in pools:
        for digest, error in reversed([*pool.loads.failures.faults.items()]):
            entry = pool.entries.get(digest)
            num_known += entry is None
            if len(failed) == MAX_FAILED:
                continue
            if entry is not None:
                near.pop(entry, None)
                failed.append(_status(entry, error))
            else:
                far = digest, pool.loads.far_tier(digest), 0, 0, False
                failed.append(AdapterStatus(*far, error.code, str(error)[:MAX_TEXT]))
    adapters = [_status(entry) for entry in islice(near, MAX_ADAPTERS - len(failed))] + failed
    return AdapterList(adapters, num_known - len(adapters), *_totals(pools, host))


def _nearest(
    pools: Sequence[AdapterPool], host: HostTier, *, is_whole: bool
) -> dict[AdapterEntry, None]:
    """Returns all entries of the pools if `is_whole`, otherwise the most important ones first."""
    if is_whole:
        return {entry: None for pool in pools for entry in pool.entries.values()}
    nearest: list[Iterable[AdapterEntry]] = [
        *(pool.device.resident.values() for pool in pools),
        *(islice(pool.awaited, MAX_ADAPTERS) for pool in pools),
        islice(host.images.newest(), 2 * MAX_ADAPTERS),
    ]
    return dict.fromkeys(chain(*nearest))


def _status(entry: AdapterEntry, error: AdapterUnavailable | None = None) -> AdapterStatus:
    return AdapterStatus(
        *(entry.digest, entry.tier, entry.num_bytes, entry.leases, entry.is_pinned),
        *("", "") if error is None else (error.code, str(error)[:MAX_TEXT]),
        name=entry.name[:MAX_TEXT],
    )


def _totals(pools: Sequence[AdapterPool], host: HostTier) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the number and the bytes of the adapters by their nearest tiers."""
    counts, num_bytes = Counter(host=len(host.images)), Counter(host=host.images.num_bytes)
    for pool in pools:
        counts["loading"] += pool.loads.num_open
        for entry in pool.device.resident.values():
            if entry.loading is None:
                counts["device"] += 1
            num_bytes[entry.tier] += entry.num_bytes
            if entry.image is not None:
                counts["host"] -= 1
                num_bytes["host"] -= entry.image.num_bytes
    return counts, num_bytes
