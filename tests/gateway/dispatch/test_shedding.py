"""Refusals that are remembered: whom they hold for, how long, and what the refused are told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.failover import ASK_AGAIN_S, LARGE, MANY, FullQueues
from workers.wire.client import WorkerClient, WorkerFailed
from workers.wire.protocol import MAX_RETRY_S, ErrorCode, Generate, SamplingParams, ServiceClass

MODEL = "m" * 64


class Gateway:
    """Asks workers that refuse everything, as long as it may ask."""

    def __init__(self, num_workers: int = 1) -> None:
        self.now = 100.0
        self.queues = FullQueues(lambda: self.now)
        self.full: Sequence[WorkerClient] = ()
        self.workers = [WorkerClient(f"unix:/nowhere/{number}") for number in range(num_workers)]

    def refuse(
        self,
        worker: int = 0,
        tenant: str = "a",
        num_bytes: int = 100,
        retry_after_s: float = 1.0,
        pace_s: float = 0.1,
    ) -> None:
        """The worker does."""
        request = Generate(1, "r", MODEL, [1], SamplingParams(1, 0), "d", tenant=tenant)
        failure = WorkerFailed(ErrorCode.OVERLOADED, "full", retry_after_s, pace_s)
        self.queues.note(self.workers[worker], request, num_bytes, failure)

    def told(
        self,
        tenant: str = "a",
        num_bytes: int = 100,
        model: str = MODEL,
        service_class: ServiceClass = ServiceClass.STANDARD,
    ) -> float | None:
        """When it may come again; None: a worker is asked."""
        try:
            line = model, tenant, service_class
            self.full = self.queues.check(self.workers, line, num_bytes)
        except WorkerFailed as failure:
            assert failure.code is ErrorCode.OVERLOADED and not failure.pace_s
            return failure.retry_after_s
        return None


def test_a_refusal_holds_until_a_place_may_have_come_free() -> None:
    gateway = Gateway()
    assert gateway.told() is None
    gateway.refuse(pace_s=0.1)
    gateway.now += 0.09
    assert gateway.told() is not None
    gateway.now += 0.02
    assert gateway.told() is None
    gateway.refuse(pace_s=0.1)
    assert gateway.told() is not None
    gateway.workers[0].num_finished += 1
    assert gateway.told() is None


def test_the_refusal_of_a_large_request_holds_as_much_longer() -> None:
    """Also when an answer ends, which makes room for a small one."""
    gateway = Gateway()
    gateway.refuse(num_bytes=16 * LARGE, pace_s=0.1)
    for _ in range(15):
        gateway.now += ASK_AGAIN_S
        gateway.workers[0].num_finished += 1
        assert gateway.told(num_bytes=16 * LARGE) is not None
        assert gateway.told(num_bytes=16 * LARGE - 1) is None
    gateway.now += 1.1 * ASK_AGAIN_S
    assert gateway.told(num_bytes=16 * LARGE) is None


def test_it_holds_for_that_tenant_class_model_and_size_alone() -> None:
    gateway = Gateway()
    gateway.refuse()
    assert gateway.told(tenant="b") is None
    assert gateway.told(service_class=ServiceClass.BATCH) is None
    assert gateway.told(model="n" * 64) is None
    assert gateway.told(num_bytes=99) is None
    assert gateway.told(num_bytes=101) is not None
    gateway.refuse(num_bytes=50)
    assert gateway.told(num_bytes=99) is not None


def test_a_worker_that_may_have_room_is_asked() -> None:
    gateway = Gateway(num_workers=2)
    gateway.refuse(worker=0)
    assert gateway.told() is None and gateway.full == gateway.workers[:1]
    gateway.refuse(worker=1)
    assert gateway.told() is not None
    gateway.workers.pop()
    assert gateway.told() is not None
    gateway.workers.clear()
    assert gateway.told() is None


def test_where_several_are_full_the_soonest_is_told() -> None:
    for places in ((5.0, 1.0), (1.0, 5.0)):
        gateway = Gateway(num_workers=2)
        for worker, retry_after_s in enumerate(places):
            gateway.refuse(worker=worker, retry_after_s=retry_after_s, pace_s=0.2)
        assert gateway.told() == pytest.approx(1.2)
        assert gateway.told() == pytest.approx(1.4)


@pytest.mark.parametrize("code", [ErrorCode.EXPIRED, ErrorCode.OVERLOADED, ErrorCode.WORKER_LOST])
def test_other_failures_say_nothing_of_room(code: ErrorCode) -> None:
    gateway = Gateway()
    request = Generate(1, "r", MODEL, [1], SamplingParams(1, 0), "d", tenant="a")
    gateway.queues.note(gateway.workers[0], request, 100, WorkerFailed(code, "", 2.0))
    assert gateway.told() is None


@given(
    paces=st.lists(st.floats(1e-4, 20.0), min_size=1, max_size=30),
    gaps=st.lists(st.floats(0.0, 0.5), min_size=1, max_size=60),
)
def test_a_flood_asks_once_in_a_while_and_is_told_to_come_one_after_the_other(
    paces: list[float], gaps: list[float]
) -> None:
    gateway = Gateway()
    believed_until, due = 0.0, 0.0
    for number, gap in enumerate(gaps):
        gateway.now += gap
        told_s = gateway.told()
        if told_s is None:
            assert gateway.now >= believed_until
            pace_s = paces[number % len(paces)]
            gateway.refuse(retry_after_s=1.0, pace_s=pace_s)
            believed_until = gateway.now + min(pace_s, ASK_AGAIN_S)
            due = max(due, gateway.now + 1.0)
            continue
        assert gateway.now < believed_until
        assert 0.5 <= told_s <= MAX_RETRY_S + 1e-6
        assert gateway.now + told_s > due or told_s == pytest.approx(MAX_RETRY_S)
        due = gateway.now + told_s


def test_what_is_over_is_forgotten() -> None:
    gateway = Gateway()
    for number in range(10 * MANY):
        gateway.refuse(tenant=f"t{number}")
        gateway.now += 0.05
    assert 0 < len(gateway.queues) <= 2 * MANY
