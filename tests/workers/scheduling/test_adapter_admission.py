"""Which adapters make room for those that starve, without a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.workers.scheduling.test_fair_queue import Bench
from workers.scheduling.adapter_admission import AdapterTurns
from workers.scheduling.sequence import Sequence
from workers.wire.protocol import AdapterRef

LATER = 1e3
"""By when everybody's patience is over."""


class Device:
    """Adapters in use, for others to wait for; none lacks pages."""

    def __init__(self) -> None:
        self.turns = AdapterTurns()
        self.bench = Bench()
        self.running: list[Sequence] = []

    def use(self, adapter: str, num_left: int) -> None:
        self.running.append(self.bench.add("t", max_tokens=num_left, adapter=adapter))

    def want(self, adapter: str, at: float) -> None:
        sequence = self.bench.add("t", adapter=adapter)
        self.turns.note_waiting(sequence)
        self.turns.note_short(sequence, adapter, at)

    def choose(self, may_displace: Callable[[AdapterRef, str], bool] = lambda *_: True) -> None:
        self.turns.choose_victims(LATER, self.running, may_displace, lambda _: 0)

    def limit(self, adapter: str) -> int | None:
        """What may still begin on it is no longer than this; None: it makes room for nobody."""
        for num_tokens in range(100):
            sequence = self.bench.add("t", max_tokens=num_tokens + 1, adapter=adapter)
            if not self.turns.may_start(sequence, adapter):
                return num_tokens
        return None


@pytest.fixture
def device() -> Device:
    return Device()


def test_who_starves_longer_gets_what_ends_sooner_and_keeps_it(device: Device) -> None:
    device.use("long", 30)
    device.use("short", 10)
    device.want("first", at=1.0)
    device.choose()
    assert (device.limit("short"), device.limit("long")) == (10, None)
    device.choose()
    assert (device.limit("short"), device.limit("long")) == (9, None)
    device.want("second", at=2.0)
    device.want("third", at=3.0)
    device.choose()
    assert (device.limit("short"), device.limit("long")) == (8, 30)
    loads = [device.turns.may_load(name) for name in ("first", "second", "third", "other")]
    assert loads == [True, True, False, False]


@pytest.mark.parametrize("lefts", [(30, 5), (5, 30)])
def test_an_adapter_ends_with_the_last_sequence_on_it(
    device: Device, lefts: tuple[int, int]
) -> None:
    for num_left in lefts:
        device.use("two", num_left)
    device.use("one", 20)
    device.want("first", at=1.0)
    device.choose()
    assert (device.limit("one"), device.limit("two")) == (20, None)


def test_who_finds_nobody_does_not_keep_others_from_it(device: Device) -> None:
    device.use("small", 10)
    device.want("large", at=1.0)
    device.want("other", at=2.0)
    device.choose(lambda wanted, _: wanted.digest == "other")
    assert device.limit("small") == 10
    assert device.turns.may_load("other") and not device.turns.may_load("large")
