"""What each tier keeps, in which order loads run, and that no bound is ever passed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread

import numpy as np
import pytest

from adapters.pool.image import ImageCache
from adapters.pool.packed_image import AdapterImage, ImageTables
from adapters.pool.source import AdapterUnavailable, NoRoom
from memory.accounts import LAST_TURN, Tenant
from memory.eviction.adapter_memory import UNIT_BYTES
from memory.eviction.copy_queue import Copy, CopyQueue
from tests.adapters.pools import PoolSetup, SteppedExecutor
from tests.memory.holder import num_placements

ONE_UNIT, TWO_UNITS = 4, 16
"""Ranks whose images take that many units."""
UNIT_IMAGE = 30_720
"""Bytes of a rank 4 image."""


def image_of(size: int, digest: str = "0" * 64) -> AdapterImage:
    payload = np.zeros(size, np.uint8)
    return AdapterImage(digest, ImageTables.empty(1), payload, b"")


def test_the_next_copy_is_chosen_when_the_thread_is_free() -> None:
    executor = SteppedExecutor()
    queue = CopyQueue[AdapterImage](executor, Lock())
    ran: list[str] = []
    outcomes: list[AdapterImage | BaseException] = []

    def load(name: str, **turns: tuple[float, int]) -> Copy[AdapterImage]:
        def work() -> AdapterImage:
            ran.append(name)
            if name == "pin":
                raise OSError("no such file")
            return image_of(len(ran))

        made = Copy(work, outcomes.append, turns)
        queue.submit(made)
        return made

    load("pin")
    late = load("awaited since", a=LAST_TURN)
    load("prefetched", a=LAST_TURN)
    load("awaited", a=(0.0, 2))
    load("of two", a=LAST_TURN, b=(0.0, 9))
    dropped = load("dropped", c=(0.0, 0))
    late.turns["a"] = (0.0, 1)
    assert queue.cancel(dropped) and queue.num_open == 5
    executor.drain()
    assert ran == ["awaited since", "of two", "awaited", "prefetched", "pin"]
    assert not queue.cancel(late) and queue.num_open == 0
    assert [o.num_bytes for o in outcomes if isinstance(o, AdapterImage)] == [1, 2, 3, 4]
    assert isinstance(outcomes[4], OSError)


def test_submitting_never_waits_for_the_load_in_progress() -> None:
    begun, may_end, lock = Event(), Event(), Lock()
    outcomes: list[AdapterImage | BaseException] = []

    def slow() -> AdapterImage:
        begun.set()
        assert may_end.wait(60)
        return image_of(1)

    with ThreadPoolExecutor(1) as executor:
        queue = CopyQueue[AdapterImage](executor, lock)
        first = Copy(slow, outcomes.append, {})
        with lock:
            queue.submit(first)
        assert begun.wait(60)
        others = [Copy(lambda: image_of(1), outcomes.append, {}) for _ in range(100)]

        def engine_thread() -> None:
            with lock:
                for other in others:
                    queue.submit(other)
                assert not queue.cancel(first) and queue.cancel(others[7])
            may_end.set()

        thread = Thread(target=engine_thread)
        thread.start()
        thread.join(30)
        assert may_end.is_set(), "the engine thread waited"
    assert len(outcomes) == 100 and queue.num_open == 0


def test_what_somebody_waits_for_overtakes_prefetches(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 4)
    for ref in setup.refs:
        setup.pool.prefetch(ref)
    setup.pool.begin_step(())
    assert setup.lease(setup.refs[3]) is None
    setup.executor.step()
    setup.pool.begin_step(())
    assert [setup.tier(i) for i in range(3)] == ["loading"] * 3 and num_placements(
        setup.placements
    ) == 1
    setup.executor.drain()
    assert [setup.tier(i) for i in range(4)] == ["host"] * 3 + ["device"]


def test_the_host_keeps_what_is_asked_for_most(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 4, host_bytes=3 * UNIT_IMAGE)
    for index, requests in ((0, 3), (1, 1), (2, 2)):
        for _ in range(requests):
            setup.now += 1.0
            setup.pool.prefetch(setup.refs[index])
            setup.settle()
    setup.pool.prefetch(setup.refs[3])
    setup.settle()
    assert [setup.tier(i) for i in range(4)] == ["host", "disk", "host", "host"]
    setup.check()


def test_the_host_image_of_what_is_on_the_device_goes_first(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 3, host_bytes=2 * UNIT_IMAGE)
    for _ in range(5):
        setup.load(0).release()
    setup.pool.prefetch(setup.refs[1])
    setup.pool.prefetch(setup.refs[2])
    setup.settle()
    assert [setup.tier(i) for i in range(3)] == ["device", "host", "host"]
    for _ in range(50):
        setup.pool.prefetch(setup.refs[0])
    assert not setup.pool.loads.num_open, "nobody needs it there"
    setup.check()


def test_many_prefetches_do_not_push_out_the_warm(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 8, host_bytes=2 * UNIT_IMAGE)
    for _ in range(4):
        setup.pool.prefetch(setup.refs[0])
        setup.settle()
    for ref in setup.refs[1:]:
        setup.now += 1.0
        setup.pool.prefetch(ref)
        setup.settle()
        setup.check()
    assert setup.tier(0) == "host"
    assert [status.tier for status in setup.statuses()] == ["host"] * 2
    setup.pool.prefetch(setup.refs[0])
    assert not setup.pool.loads.num_open


def test_one_that_waits_is_served_though_the_host_is_full_of_better(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 2, host_bytes=UNIT_IMAGE)
    for _ in range(50):
        setup.pool.prefetch(setup.refs[0])
        setup.settle()
    setup.pool.prefetch(setup.refs[1])
    setup.settle()
    assert [status.tier for status in setup.statuses()] == ["host"], "one is not remembered"
    assert setup.serves(setup.load(1).slot, 1)
    setup.check()


def test_the_host_bound_holds_while_copies_are_on_their_way(tmp_path: Path) -> None:
    """An image that is being copied cannot leave, so another has to wait for its room."""
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 3, host_bytes=UNIT_IMAGE)
    waiting = {0, 1, 2}
    for _ in range(40):
        setup.pool.begin_step(())
        setup.check()
        for index in sorted(waiting):
            lease = setup.lease(setup.refs[index])
            if lease is not None:
                assert setup.serves(lease.slot, index)
                waiting.remove(index)
        setup.executor.step()
    assert not waiting


@pytest.mark.parametrize(
    ("tier", "bounds"),
    [
        ("device", {"num_units": 1}),
        ("host", {"host_bytes": 100_000}),
        ("disk", {"cache_bytes": 100_000}),
    ],
)
def test_one_too_large_for_a_tier_is_refused_by_its_name(
    tmp_path: Path, tier: str, bounds: dict[str, int]
) -> None:
    setup = PoolSetup(tmp_path, [TWO_UNITS, ONE_UNIT], **bounds)  # pyright: ignore[reportArgumentType]
    with pytest.raises(AdapterUnavailable, match=f"the {tier} tier has") as caught:
        setup.load(0)
    assert caught.value.code == "adapter.too_large"
    assert setup.serves(setup.load(1).slot, 1)
    setup.check()


def test_pins_have_half_of_the_adapters_bytes(tmp_path: Path) -> None:
    """The rest are remembered, and kept as soon as there is room."""
    setup = PoolSetup(tmp_path, [ONE_UNIT, ONE_UNIT, TWO_UNITS, ONE_UNIT], num_units=4)

    def kept() -> set[int]:
        pinned = {status.digest for status in setup.statuses() if status.pinned}
        return {index for index, ref in enumerate(setup.refs) if ref.digest in pinned}

    setup.pin(*range(len(setup.refs)))
    setup.settle()
    assert kept() == {0, 1} and setup.on_device() == {0, 1}
    setup.unpin(0)
    setup.settle()
    assert kept() == {1, 3}, "two units do not fit beside one, one does"
    for index in (1, 3):
        setup.unpin(index)
    setup.settle()
    assert kept() == {2} and 2 in setup.on_device()
    setup.check()


def test_pins_have_half_of_the_slots(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 5, num_units=16, num_slots=4)
    setup.pin(0, 1, 2)
    setup.settle()
    assert setup.on_device() == {0, 1}
    for index in (3, 4):
        setup.load(index).release()
    assert setup.on_device() == {0, 1, 3, 4}
    setup.check()


def test_pins_of_two_base_models_have_half_together(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 2, num_units=4)
    pools = [setup.pool, setup.make_pool()]
    for pool in pools:
        pool.keep(setup.refs)
    for _ in range(8):
        setup.executor.drain()
        for pool in pools:
            pool.begin_step(())
    assert [sum(status.pinned for status in setup.statuses(pool)) for pool in pools] == [1, 1]


def test_a_pin_that_is_not_kept_is_not_read_again_and_again(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT, TWO_UNITS], num_units=2, host_bytes=2 * UNIT_BYTES)
    setup.pin(*range(len(setup.refs)))
    setup.settle()
    assert setup.on_device() == {0}
    for _ in range(5):
        setup.pool.begin_step(())
        assert not setup.pool.loads.num_open
    setup.unpin(1)
    assert setup.refs[1].digest not in {status.digest for status in setup.statuses()}


def on_host(setup: PoolSetup) -> set[int]:
    return {index for index in range(len(setup.refs)) if setup.tier(index) == "host"}


def test_the_image_of_a_pin_waits_on_the_host_for_room_on_the_device(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 4, num_units=2, host_bytes=UNIT_IMAGE)
    leases = [setup.load(index) for index in range(2)]
    setup.pin(2)
    setup.settle()
    assert on_host(setup) == {2}
    for _ in range(5):
        setup.pool.prefetch(setup.refs[3], Tenant("acme", 1))
        setup.settle()
    assert on_host(setup) == {2}
    for lease in leases:
        lease.release()
    setup.settle()
    assert 2 in setup.on_device()
    setup.pool.prefetch(setup.refs[3], Tenant("acme", 1))
    setup.settle()
    assert on_host(setup) == {3}, "on the device it needs no image on the host"
    setup.check()


def test_one_without_room_on_the_host_is_read_once_and_starves(tmp_path: Path) -> None:
    """Until another that waits for the device, and was requested more, no longer does."""
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 3, num_units=1, host_bytes=UNIT_IMAGE)
    fetched: list[str] = []
    fetch = setup.loader.fetch
    setup.loader.fetch = lambda digest, *a, **k: (
        fetched.append(digest),
        fetch(digest, *a, **k),
    )[1]
    lease = setup.load(0)
    waiting, roomless = setup.refs[1:]
    for _ in range(5):
        setup.pool.prefetch(waiting)
    fetched.clear()
    outcome = None
    for _ in range(5):
        setup.pool.acquire(waiting)
        outcome = setup.pool.acquire(roomless)
        setup.executor.drain()
        setup.pool.begin_step(())
    assert fetched == [waiting.digest, roomless.digest] and outcome == NoRoom(0)
    lease.release()
    setup.pool.cancel(waiting)
    assert setup.serves(setup.load(2).slot, 2)
    setup.pool.cancel(waiting)
    setup.check()


def test_one_without_room_on_the_host_is_forgotten_when_no_request_waits(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 2, num_units=1, host_bytes=UNIT_IMAGE)
    for _ in range(5):
        setup.pool.prefetch(setup.refs[0])
        setup.pool.load(setup.refs[0])
    setup.pool.load(setup.refs[1])
    setup.executor.drain()
    for _ in range(3):
        setup.pool.begin_step(())
    assert [status.digest for status in setup.statuses()] == [setup.refs[0].digest]


@pytest.fixture
def cached(tmp_path: Path) -> Callable[..., ImageCache]:
    def make(max_bytes: int, reuse: dict[str, float] | None = None) -> ImageCache:
        return ImageCache(tmp_path, max_bytes, lambda digest: (reuse or {})[digest])

    return make


DIGESTS = [str(number) * 64 for number in range(6)]


def kept_by(cache: ImageCache) -> set[str]:
    return {digest for digest in DIGESTS if cache.has("layout", digest)}


def test_the_disk_keeps_what_is_asked_for_most(cached: Callable[..., ImageCache]) -> None:
    reuse = dict(zip(DIGESTS, (3.0, 0.5, 2.0, 0.1, 1.0, 1.0), strict=True))
    cache = cached(3 * 100_000, reuse)
    for digest in DIGESTS[:3]:
        cache.save("layout", image_of(90_000, digest))
    cache.save("layout", image_of(90_000, DIGESTS[3]))
    assert kept_by(cache) == {DIGESTS[0], DIGESTS[2], DIGESTS[3]}
    cache.save("layout", image_of(90_000, DIGESTS[4]))
    assert kept_by(cache) == {DIGESTS[0], DIGESTS[2], DIGESTS[4]}


def test_the_disk_bound_holds_at_every_moment(
    cached: Callable[..., ImageCache], tmp_path: Path
) -> None:
    max_bytes = 250_000
    cache = cached(max_bytes, dict.fromkeys(DIGESTS, 1.0))
    stop = Event()
    totals: list[int] = []

    def look() -> dict[int, int]:
        """Sizes by inode."""
        found: dict[int, int] = {}
        for path in tmp_path.rglob("*.*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found[status.st_ino] = status.st_size
        return found

    def watch() -> None:
        """A look that the next one confirms was true at a moment between them."""
        before: dict[int, int] = {}
        while not (stop.is_set() and totals):
            now = look()
            if now == before:
                totals.append(sum(now.values()))
            before = now

    thread = Thread(target=watch)
    thread.start()
    for turn in range(300):
        cache.save("layout", image_of(80_000 + turn * 100, DIGESTS[turn % 6]))
    cache.save("layout", image_of(max_bytes + 1, DIGESTS[0]))
    stop.set()
    thread.join()
    assert 80_000 < max(totals) <= max_bytes
    assert not cache.has("layout", DIGESTS[0]), "larger than all there is"


def test_a_smaller_bound_holds_from_the_start(cached: Callable[..., ImageCache]) -> None:
    cache = cached(1 << 20, dict.fromkeys(DIGESTS, 1.0))
    for digest in DIGESTS:
        cache.save("layout", image_of(50_000, digest))
    assert len(kept_by(cached(150_000, dict.fromkeys(DIGESTS, 1.0)))) == 2


def test_the_host_is_one_for_all_base_models(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 4, host_bytes=2 * UNIT_IMAGE)
    other = setup.make_pool()
    for pool, index, num_requests in ((setup.pool, 0, 1), (other, 1, 3), (other, 2, 2)):
        for _ in range(num_requests):
            pool.prefetch(setup.refs[index])
            setup.executor.drain()
        setup.check()
        other.check_integrity()
    assert [status.digest for status in setup.statuses()] == []
    assert [status.tier for status in setup.statuses(other)] == ["host", "host"]
    setup.pool.prefetch(setup.refs[3])
    setup.executor.drain()
    assert setup.tier(3) == "disk"
    other.close()
    setup.pool.prefetch(setup.refs[3])
    setup.executor.drain()
    assert setup.tier(3) == "host"


def test_the_disk_is_one_for_all_layouts(cached: Callable[..., ImageCache]) -> None:
    """Those that no model has any more, too: nobody asks for what they have."""
    max_bytes = 250_000
    cache = cached(max_bytes, dict.fromkeys(DIGESTS, 1.0))
    cache.save("old", image_of(90_000, DIGESTS[0]))
    cache.save("layout", image_of(90_000, DIGESTS[1]))
    cache = cached(max_bytes, dict(zip(DIGESTS, (0.0, 1.0, 1.0), strict=False)))
    assert cache.has("old", DIGESTS[0])
    cache.save("layout", image_of(90_000, DIGESTS[2]))
    assert not cache.has("old", DIGESTS[0]) and kept_by(cache) == {DIGESTS[1], DIGESTS[2]}
