"""A worker that drains finishes what runs and gives back what has not begun."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers.driver import Driver
from tests.workers.process.test_worker import Setup
from workers.process.server import SERVER
from workers.wire.frames import Drain
from workers.wire.protocol import ErrorCode, FinishReason

GATEWAY = 1


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("llama"), "llama", {"a": {"rank": 4}})


@pytest.fixture(params=[False, True], ids=["in-turn", "ahead"])
def driver(llama: Setup, request: pytest.FixtureRequest) -> Iterator[Driver]:
    with Driver(llama.config(max_num_seqs=1, runs_ahead=request.param)) as driver:
        yield driver


def test_what_waits_is_given_back_and_what_runs_ends(llama: Setup, driver: Driver) -> None:
    driver.submit(llama.generate(0, [1, 2, 3], 300, None))
    driver.submit(llama.generate(1, [4, 5, 6], 300, None))
    driver.await_begun(0)
    driver.loop.post(GATEWAY, Drain())
    driver.run(llama.generate(2, [7, 8, 9], 300, None))
    assert driver.ended == {
        0: FinishReason.LENGTH,
        1: ErrorCode.DRAINING,
        2: ErrorCode.DRAINING,
    }
    assert len(driver.answers[0]) == 300 and driver.await_status(lambda status: status.draining)


def test_a_drain_is_taken_back_but_not_that_of_an_ending_process(
    llama: Setup, driver: Driver
) -> None:
    driver.loop.post(GATEWAY, Drain())
    driver.await_status(lambda status: status.draining)
    driver.loop.post(GATEWAY, Drain(is_on=False))
    driver.await_status(lambda status: not status.draining)
    driver.submit(llama.generate(0, [1, 2, 3], 300, None))
    driver.await_begun(0)
    driver.loop.post(SERVER, Drain())
    driver.await_drained()
    assert driver.ended == {0: FinishReason.LENGTH}, "it was drained before its last end"
    driver.loop.post(GATEWAY, Drain(is_on=False))
    driver.run(llama.generate(1, [1, 2, 3], 2, None))
    assert driver.ended == {0: FinishReason.LENGTH, 1: ErrorCode.DRAINING}
