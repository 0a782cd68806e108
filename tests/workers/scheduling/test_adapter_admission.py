"""Which adapters make room for those that starve, without a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adapters.pool.source import AdapterRef, FixedAdapters, NoRoom
from memory.accounts import FIRST_TURN, NO_TENANT, Tenant, Turn
from tests.workers.scheduling.test_fair_queue import Bench
from workers.policies.fairness_policy import FairnessPolicy
from workers.scheduling.adapter_admission import LATER as WAIT
from workers.scheduling.adapter_admission import AdapterAdmission
from workers.scheduling.sequence import Sequence
from workers.scheduling.tenant_queue import TERMS
from workers.wire.protocol import ServiceClass

POLICY = FairnessPolicy(max_num_seqs=8, max_batched_tokens=64)
LATER = 1e3
"""By when everybody's patience is over."""


class FullPool(FixedAdapters):
    """Adapters without room on the device."""

    def __init__(self) -> None:
        super().__init__({})
        self.num_pages_lacking = 0
        self.displaces: Callable[[AdapterRef], bool] = lambda _: True

    def may_displace(self, ref: AdapterRef, other: str) -> bool:
        return self.displaces(ref)

    def missing_bytes(self, ref: AdapterRef) -> int | None:
        return self.num_pages_lacking or None

    def acquire(
        self, ref: AdapterRef, tenant: Tenant = NO_TENANT, turn: Turn = FIRST_TURN
    ) -> NoRoom:
        return NoRoom(self.num_pages_lacking)


class Device:
    """Adapters in use, for others to wait for."""

    def __init__(self) -> None:
        self.pool = FullPool()
        self.turns = AdapterAdmission(self.pool, POLICY.charged)
        self.bench = Bench()
        self.running: list[Sequence] = []

    def use(self, adapter: str, num_left: int) -> None:
        self.running.append(self.bench.add("t", max_tokens=num_left, adapter=adapter))

    def want(self, adapter: str, at: float) -> None:
        sequence = self.bench.add("t", adapter=adapter)
        self.turns.add_waiting(sequence)
        self.turns.begin_step(at, self.running)
        assert self.turns.acquire(sequence) is WAIT

    def choose(self, now: float = LATER) -> None:
        self.turns.begin_step(now, self.running)

    def closed(self, *adapters: str) -> list[str]:
        """Those that no sequence may start on."""
        return [each for each in adapters if not self.turns.may_start(each)]


@pytest.fixture
def device() -> Device:
    return Device()


def test_the_adapter_that_starves_longest_gets_what_ends_first_and_keeps_it(device: Device) -> None:
    device.use("long", 30)
    device.use("short", 10)
    for at, name in enumerate(("first", "second", "third"), start=1):
        device.want(name, at=float(at))
    patience_s = TERMS[ServiceClass.STANDARD].ttft_s
    device.choose(1.0 + patience_s)
    assert device.closed("short", "long") == ["short"]
    device.choose()
    assert device.closed("short", "long") == ["short", "long"]
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
    assert device.closed("one", "two") == ["one"]


def test_who_finds_nobody_does_not_keep_others_from_it(device: Device) -> None:
    device.use("small", 10)
    device.want("large", at=1.0)
    device.want("other", at=2.0)
    device.pool.displaces = lambda wanted: wanted.digest == "other"
    device.choose()
    assert device.closed("small") == ["small"]
    assert device.turns.may_load("other") and not device.turns.may_load("large")


def test_where_the_base_model_holds_the_memory_only_starving_adapters_begin(device: Device) -> None:
    sequence = device.bench.add("t", max_tokens=10)
    device.running.append(sequence)
    device.want("starving", at=1.0)
    device.pool.num_pages_lacking = 3
    device.choose()
    turns = device.turns
    assert [turns.may_load(name) for name in ("starving", "other")] == [True, False]
    begins = [turns.may_start(name) for name in ("starving", "other", None)]
    assert begins == [True, False, False]
    device.running.clear()
    device.choose()
    assert turns.may_load("other") and turns.may_start(None)
