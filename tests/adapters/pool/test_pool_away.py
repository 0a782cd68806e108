"""Adapters of a base model that leaves the device and comes back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from ops.base import StreamName
from tests.adapters.pools import House


def test_they_stay_on_the_host_and_come_back_as_they_were(tmp_path: Path) -> None:
    house = House(tmp_path, [4, 8])
    for index in (0, 1):
        house.load(index).release()
    assert house.on_device() == {0, 1}
    house.pool.leave_device()
    house.check()
    assert "a" not in house.map.map() and house.tier(0) == house.tier(1) == "host"
    assert house.lease(house.refs[0]) is None
    assert house.tier(0) == "host", "nobody comes before the model does"
    house.pool.device.is_here = True
    lease = house.load(0)
    assert house.serves(lease.slot, 0)
    lease.release()
    house.check()


def test_one_that_is_fetched_meanwhile_waits_on_the_host(tmp_path: Path) -> None:
    house = House(tmp_path, [4])
    house.pool.leave_device()
    house.pool.load(house.refs[0])
    house.executor.step()
    assert house.tier(0) == "host"
    house.check()


def test_a_copy_in_progress_ends_on_the_host(tmp_path: Path) -> None:
    house = House(tmp_path, [4])
    house.pool.prefetch(house.refs[0])
    house.settle()
    side_stream = house.ops.side_stream

    def leave_and_copy(name: StreamName) -> AbstractContextManager[None]:
        if name == "adapters":
            house.pool.leave_device()
        return side_stream(name)

    house.ops.side_stream = leave_and_copy
    assert house.lease(house.refs[0]) is None
    house.settle()
    assert house.tier(0) == "host" and "a" not in house.map.map()
    house.check()


def test_a_copy_that_has_not_begun_is_dropped(tmp_path: Path) -> None:
    house = House(tmp_path, [4])
    house.pool.prefetch(house.refs[0])
    house.settle()
    house.pool.load(house.refs[0])
    house.pool.leave_device()
    assert house.tier(0) == "host" and "a" not in house.map.map()
    house.check()


def test_pins_are_kept_when_the_model_is_back(tmp_path: Path) -> None:
    house = House(tmp_path, [4])
    house.pin(0)
    house.settle()
    assert house.on_device() == {0}
    house.pool.leave_device()
    house.settle()
    assert not house.on_device()
    house.pool.device.is_here = True
    house.settle()
    assert house.on_device() == {0}
    house.check()
