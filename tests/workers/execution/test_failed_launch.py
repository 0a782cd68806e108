"""A step that fails while it is launched: what was submitted before goes on, on a device that works
beside the host, and writes into the pages of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ops.base import Ops
from ops.registry import select
from tests.workers.formed_worker import FormedWorker
from tests.workers.process.test_worker import Setup
from workers.execution.engine import Engine, EngineFailed
from workers.wire.protocol import ErrorCode, Failed


class Beside:
    """The reference backend, said to work beside the host: what is submitted has ended when it is
    waited for. The activation of one layer is where a kernel fails to start."""

    def __init__(self) -> None:
        self._ops = select("reference")
        self.num_submitted = 0
        self.num_ended = 0
        self.fails = False
        self.is_lost = False

    def __getattr__(self, name: str) -> Any:
        value: Any = getattr(self._ops, name)
        if name not in ("embed", "linear", "rope_write_kv", "paged_attention", "gated_activation"):
            return value
        work: Callable[..., Any] = value

        def submit(*arguments: Any, **options: Any) -> Any:
            if self.fails and name == "gated_activation":
                raise RuntimeError("out of resources")
            self.num_submitted += 1
            return work(*arguments, **options)

        return submit

    def record_event(self) -> Event:
        return Event(self, self.num_submitted)


class Event:
    def __init__(self, device: Beside, number: int) -> None:
        self._device, self._number = device, number

    def synchronize(self) -> None:
        if self._device.is_lost:
            raise RuntimeError("an illegal memory access was encountered")
        self._device.num_ended = max(self._device.num_ended, self._number)

    def query(self) -> bool:
        return self._device.num_ended >= self._number

    def wait(self) -> None:
        pass


class WorkerBeside(FormedWorker):
    device: Beside

    def _select_ops(self) -> Ops:
        self.device = Beside()
        return self.device  # pyright: ignore


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("llama"), "llama", {})


def begin(llama: Setup) -> tuple[Engine, Beside]:
    worker = WorkerBeside(
        llama.config(runs_ahead=True), instance_id="test", progress=lambda *_: None
    )
    engine = worker.instances[llama.digest].engine
    assert engine.submit(0, llama.generate(1, [1, 2, 3], 8, None)) is None
    engine.step()
    return engine, worker.device


def test_pages_of_a_failed_launch_come_free_when_the_device_is_done(llama: Setup) -> None:
    engine, device = begin(llama)
    num_free = engine.scheduler.kv.num_free
    assert device.num_ended < device.num_submitted, "a step is in flight"
    device.fails = True
    submitted = device.num_submitted
    *_, event = engine.step()
    assert isinstance(event[1], Failed) and event[1].code is ErrorCode.INTERNAL
    assert device.num_submitted > submitted, "part of the step was submitted"
    assert engine.scheduler.kv.num_free > num_free
    assert device.num_ended == device.num_submitted
    device.fails = False
    assert engine.submit(0, llama.generate(2, [1, 2, 3], 8, None)) is None
    while engine.has_work:
        events = engine.step()
    assert events and not isinstance(events[-1][1], Failed)


def test_a_device_that_cannot_be_waited_for_ends_the_worker(llama: Setup) -> None:
    engine, device = begin(llama)
    device.fails = device.is_lost = True
    num_free = engine.scheduler.kv.num_free
    with pytest.raises(EngineFailed, match="cannot be waited for: an illegal memory access"):
        engine.step()
    assert engine.scheduler.kv.num_free == num_free


def test_a_device_that_is_lost_in_flight_ends_the_worker(llama: Setup) -> None:
    engine, device = begin(llama)
    device.is_lost = True
    with pytest.raises(EngineFailed, match="cannot be waited for"):
        engine.step()
