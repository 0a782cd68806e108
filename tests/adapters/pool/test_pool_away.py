"""Adapters of a base model that leaves the device and comes back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from ops.base import StreamName
from tests.adapters.pools import PoolSetup


def test_they_stay_on_the_host_and_come_back_as_they_were(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [4, 8])
    for index in (0, 1):
        setup.load(index).release()
    assert setup.on_device() == {0, 1}
    setup.pool.leave_device()
    setup.check()
    assert "a" not in setup.map.map() and setup.tier(0) == setup.tier(1) == "host"
    assert setup.lease(setup.refs[0]) is None
    assert setup.tier(0) == "host", "nobody comes before the model does"
    setup.pool.device.is_here = True
    lease = setup.load(0)
    assert setup.serves(lease.slot, 0)
    lease.release()
    setup.check()


def test_one_that_is_fetched_meanwhile_waits_on_the_host(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [4])
    setup.pool.leave_device()
    setup.pool.load(setup.refs[0])
    setup.executor.step()
    assert setup.tier(0) == "host"
    setup.check()


def test_a_copy_in_progress_ends_on_the_host(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [4])
    setup.pool.prefetch(setup.refs[0])
    setup.settle()
    side_stream = setup.ops.side_stream

    def leave_and_copy(name: StreamName) -> AbstractContextManager[None]:
        if name == "adapters":
            setup.pool.leave_device()
        return side_stream(name)

    setup.ops.side_stream = leave_and_copy
    assert setup.lease(setup.refs[0]) is None
    setup.settle()
    assert setup.tier(0) == "host" and "a" not in setup.map.map()
    setup.check()


def test_a_copy_that_has_not_begun_is_dropped(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [4])
    setup.pool.prefetch(setup.refs[0])
    setup.settle()
    setup.pool.load(setup.refs[0])
    setup.pool.leave_device()
    assert setup.tier(0) == "host" and "a" not in setup.map.map()
    setup.check()


def test_pins_are_kept_when_the_model_is_back(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [4])
    setup.pin(0)
    setup.settle()
    assert setup.on_device() == {0}
    setup.pool.leave_device()
    setup.settle()
    assert not setup.on_device()
    setup.pool.device.is_here = True
    setup.settle()
    assert setup.on_device() == {0}
    setup.check()
