"""Loads that wait for the one loader thread, the most urgent first."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from threading import Lock

from adapters.image import AdapterImage


@dataclass(slots=True, eq=False)
class Load:
    """A fetch to the host or a copy to the device. is_awaited may change while it waits."""

    work: Callable[[], AdapterImage]
    is_copy: bool
    is_awaited: bool
    future: Future[AdapterImage] = field(default_factory=Future[AdapterImage])

    def cancel(self) -> bool:
        """False: it has begun, or is done."""
        return self.future.cancel()

    @property
    def urgency(self) -> tuple[bool, bool]:
        """The least goes first: what somebody waits for; a copy, for it is short and the device
        bytes that it fills serve nobody meanwhile."""
        return not self.is_awaited, not self.is_copy


class LoadQueue:
    """Chooses when a thread is free, not when a load is submitted. Used by the engine thread; the
    executor's runs what it chooses."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = Lock()
        self._waiting: list[Load] = []
        """In the order of submission."""

    def submit(self, load: Load) -> None:
        with self._lock:
            self._waiting.append(load)
        self._executor.submit(self._run_next)

    def _run_next(self) -> None:
        load = self._take()
        if load is None:
            return
        try:
            image = load.work()
        except BaseException as error:
            load.future.set_exception(error)
        else:
            load.future.set_result(image)

    def _take(self) -> Load | None:
        with self._lock:
            while self._waiting:
                load = min(self._waiting, key=lambda load: load.urgency)
                self._waiting.remove(load)
                if load.future.set_running_or_notify_cancel():
                    return load
        return None
