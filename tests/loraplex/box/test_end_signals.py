"""Signals that end a supervisor are never lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from loraplex.box.end_signals import EndSignals


@pytest.fixture
def signals() -> Iterator[EndSignals]:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield EndSignals()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_what_runs_in_a_loop(signals: EndSignals, number: int) -> None:
    steps: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            steps.append("the handler raised nothing here")
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        signals.run(work())
    assert steps == ["the handler raised nothing here", "cleaned up"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_outside_of_a_loop_interrupts(signals: EndSignals, number: int) -> None:
    async def work() -> int:
        return 1

    assert signals.run(work()) == 1
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_finalizer_is_not_lost(signals: EndSignals) -> None:
    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    Finalized()
    with pytest.raises(KeyboardInterrupt):
        signals.run(asyncio.sleep(60))
