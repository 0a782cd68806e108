"""Which adapters make room for those that starve, without a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adapters.pool.source import AdapterLease, AdapterTurn, AdapterUse, Loading, NoRoom
from adapters.pool.turns import AdapterTurns
from adapters.reference import AdapterRef
from memory.accounts import NO_TENANT
from workers.scheduling.policy import UNCHARGED

PATIENCE_S = 4.0
LATER = 1e3
"""Time in seconds at which every adapter that waits has waited longer than `PATIENCE_S`."""


class Charged:
    def __init__(self, charged: float = 0.0) -> None:
        self.charge = (0.0, charged)


class Device:
    """Device without room, and adapters in use for others to wait for."""

    def __init__(self) -> None:
        self.missing_bytes = 0
        self.displaces: Callable[[AdapterRef], bool] = lambda _: True
        self.turns = AdapterTurns(
            lambda _: self.missing_bytes or None, lambda ref, _: self.displaces(ref)
        )
        self.in_use: list[AdapterUse] = []

    def use(self, adapter: str | None, num_left: int, charged: float = 0.0) -> None:
        self.in_use.append(AdapterUse(adapter, Charged(charged), num_left))

    def want(self, adapter: str, at: float) -> None:
        self.poll(at)
        assert isinstance(self.ask(adapter), NoRoom)

    def poll(self, now: float = LATER) -> None:
        self.turns.begin(now, self.in_use)

    def ask(self, adapter: str, charged: float = 0.0) -> AdapterLease | Loading | NoRoom:
        """Answers NoRoom if the adapter may be loaded, and Loading if it has to wait."""
        turn = AdapterTurn(NO_TENANT, Charged(charged), PATIENCE_S)
        return self.turns.acquire(AdapterRef(adapter), turn, lambda *_: NoRoom(self.missing_bytes))

    def may_load(self, adapter: str, charged: float = 0.0) -> bool:
        return isinstance(self.ask(adapter, charged), NoRoom)

    def lease(self, adapter: str) -> AdapterLease | Loading | NoRoom:
        """Asks for an adapter that is on the device."""
        lease = AdapterLease(0, 8, "", 0, None)
        turn = AdapterTurn(NO_TENANT, Charged(), PATIENCE_S)
        return self.turns.acquire(AdapterRef(adapter), turn, lambda *_: lease)


@pytest.fixture
def device() -> Device:
    return Device()


def closed(device: Device, *adapters: str) -> list[str]:
    """Returns the adapters that may not be loaded, even for a tenant that was charged least."""
    return [each for each in adapters if not device.may_load(each, charged=-1.0)]


def test_the_adapter_that_starves_longest_gets_what_ends_first_and_keeps_it(device: Device) -> None:
    device.use("long", 30)
    device.use("short", 10)
    for at, name in enumerate(("first", "second", "third"), start=1):
        device.want(name, at=float(at))
    device.poll(1.0 + PATIENCE_S)
    assert closed(device, "short", "long") == ["short"]
    device.poll()
    assert closed(device, "short", "long") == ["short", "long"]
    loads = [device.may_load(name) for name in ("first", "second", "third", "other")]
    assert loads == [True, True, False, False]


@pytest.mark.parametrize("lefts", [(30, 5), (5, 30)])
def test_an_adapter_ends_with_the_last_sequence_on_it(
    device: Device, lefts: tuple[int, int]
) -> None:
    for num_left in lefts:
        device.use("two", num_left)
    device.use("one", 20)
    device.want("first", at=1.0)
    device.poll()
    assert closed(device, "one", "two") == ["one"]


def test_the_adapter_of_a_tenant_that_was_charged_less_is_spared(device: Device) -> None:
    device.use("long", 30)
    device.use("short", 10, charged=-1.0)
    device.want("first", at=1.0)
    device.poll()
    assert closed(device, "short", "long") == ["long"]


def test_an_adapter_starves_for_the_tenant_whose_turn_is_first(device: Device) -> None:
    """A waiting tenant that was charged more and wants the same adapter does not count."""
    device.use("running", 10, charged=9.0)
    device.poll(1.0)
    assert device.may_load("shared", charged=1.0)
    for _ in range(2):
        device.poll()
        device.ask("shared", charged=1.0)
        device.ask("shared", charged=5.0)
    device.poll()
    assert not device.may_load("other", charged=3.0)


def test_a_sequence_that_has_just_ended_spares_nobody(device: Device) -> None:
    """Nor is the tenant of another spared less for it."""
    device.use("heavy", 30, charged=5.0)
    device.use("light", 10, charged=-1.0)
    device.in_use.append(AdapterUse("heavy", UNCHARGED, 0))
    device.poll(1.0)
    assert device.may_load("first", charged=1.0)
    device.poll()
    assert closed(device, "light", "heavy") == ["heavy"]


def test_who_finds_nobody_does_not_keep_others_from_it(device: Device) -> None:
    device.use("small", 10)
    device.want("large", at=1.0)
    device.want("other", at=2.0)
    device.displaces = lambda wanted: wanted.digest == "other"
    device.poll()
    assert closed(device, "small") == ["small"]
    assert device.may_load("other") and not device.may_load("large")


def test_where_the_base_model_holds_the_memory_only_starving_adapters_begin(device: Device) -> None:
    device.use(None, 10)
    device.want("starving", at=1.0)
    device.missing_bytes = 3
    device.poll()
    assert device.turns.lacks_pages and not device.turns.is_open
    assert [device.may_load(name) for name in ("starving", "other")] == [True, False]
    assert isinstance(device.lease("one of those on the device"), Loading)
    device.in_use.clear()
    device.poll()
    assert device.may_load("other") and device.turns.is_open


def test_what_is_leased_or_given_up_starves_no_longer(device: Device) -> None:
    device.use("small", 10)
    device.want("first", at=1.0)
    device.poll()
    assert not device.turns.is_open
    device.turns.forget("first")
    assert device.turns.is_open
