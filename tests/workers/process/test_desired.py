"""What gateways want kept: applied by generation, on an idle worker too, and told as it is."""

from __future__ import annotations

import pytest

from adapters.reference import AdapterRef
from tests.workers.driver import Driver
from tests.workers.process.test_worker import Setup
from workers.wire.frames import Desired, Pin
from workers.wire.status import AdapterStatus, WorkerStatus

ADAPTERS = {name: {"rank": 4} for name in ("a", "b", "c")}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("llama"), "llama", ADAPTERS)


def pins(llama: Setup, *names: str) -> list[Pin]:
    return [Pin(llama.digest, llama.refs[name]) for name in names]


def adapters(llama: Setup, status: WorkerStatus) -> dict[str, AdapterStatus]:
    by_digest = {adapter.digest: adapter for adapter in status.adapters}
    return {n: by_digest[ref.digest] for n, ref in llama.refs.items() if ref.digest in by_digest}


def kept(llama: Setup, status: WorkerStatus) -> set[str]:
    told = adapters(llama, status)
    return {n for n, adapter in told.items() if adapter.pinned and adapter.tier == "device"}


def test_pins_come_without_a_request_and_only_a_newer_word_changes_them(llama: Setup) -> None:
    with Driver(llama.config()) as driver:
        driver.loop.post(1, Desired(5, [*pins(llama, "a", "b"), Pin("0" * 64, llama.refs["c"])]))
        status = driver.await_status(lambda status: kept(llama, status) == {"a", "b"})
        assert status.generation == 5 and "c" not in adapters(llama, status)
        driver.loop.post(2, Desired(4, []))
        driver.loop.post(2, Desired(5, pins(llama, "c")))
        driver.run(llama.generate(0, [1, 2, 3], 4, None))
        before = driver.status
        status = driver.await_status(lambda status: status is not before)
        assert kept(llama, status) == {"a", "b"} and status.generation == 5
        driver.loop.post(1, Desired(6, pins(llama, "b", "c")))
        status = driver.await_status(lambda status: kept(llama, status) == {"b", "c"})
        assert status.generation == 6
        driver.loop.post(1, Desired(7, []))
        status = driver.await_status(lambda status: status.generation == 7)
        assert kept(llama, status) == set()


def test_pins_beyond_their_half_are_told_as_not_pinned(llama: Setup) -> None:
    with Driver(llama.config(max_loaded_adapters=4)) as driver:
        driver.loop.post(1, Desired(1, pins(llama, "a", "b", "c")))
        status = driver.await_status(lambda status: len(kept(llama, status)) == 2)
        assert [adapter.pinned for adapter in adapters(llama, status).values()].count(True) == 2


def test_a_pin_that_cannot_be_loaded_is_a_fault_and_others_are_kept(llama: Setup) -> None:
    wrong = AdapterRef(llama.refs["a"].digest, checksum="0" * 64)
    with Driver(llama.config()) as driver:
        driver.loop.post(1, Desired(1, [Pin(llama.digest, wrong), *pins(llama, "b")]))
        status = driver.await_status(
            lambda status: kept(llama, status) == {"b"} and "a" in adapters(llama, status)
        )
        status = driver.await_status(lambda status: bool(adapters(llama, status)["a"].error))
        fault = adapters(llama, status)["a"]
        assert fault.error == "adapter.image.mismatch" and not fault.pinned
        driver.run(llama.generate(0, [1, 2, 3], 4, llama.refs["b"]))
        assert len(driver.answers[0]) == 4
