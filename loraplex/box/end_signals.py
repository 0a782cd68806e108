"""Handlers of the signals that end a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class EndSignals:
    """Handlers of SIGINT and SIGTERM. They raise KeyboardInterrupt, except in a `calling` block.

    In an event loop, an exception of a signal handler could end a callback half done, and the
    cleanup would wait for the rest forever. The loop's own signal handlers lose a signal that
    arrives while the loop is closed.
    """

    def __init__(self) -> None:
        self._came = False
        self._call: Callable[[], object] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    @contextlib.contextmanager
    def calling(self, call: Callable[[], object]) -> Iterator[None]:
        """Makes each signal call `call` in the running event loop. If a signal arrived before,
        calls it at once, because Python ignores a KeyboardInterrupt in a finalizer."""
        if self._came:
            call()
        self._call = partial(asyncio.get_running_loop().call_soon_threadsafe, call)
        try:
            yield
        finally:
            self._call = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`. At a signal, cancels it and raises KeyboardInterrupt."""

        async def until_told() -> T:
            task = asyncio.current_task()
            assert task is not None
            with self.calling(task.cancel):
                return await work

        try:
            return asyncio.run(until_told())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    def _on_signal(self, *_: object) -> None:
        self._came = True
        if self._call is None:
            raise KeyboardInterrupt
        self._call()
