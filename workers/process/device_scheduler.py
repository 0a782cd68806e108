"""Whose step is next: resident models share the device by weighted service.

Each engine has a virtual time, in seconds of its steps by weight; the least goes first. One that
was idle, or had no weights or adapters to run with, begins where the others are: it has no credit.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.execution.engine import Engine


class DeviceScheduler:
    """Engines by what they were given of the device."""

    def __init__(self) -> None:
        self._virtual_s: dict[Engine, float] = {}
        """Virtual time of engines that could run at the last look."""
        self._now_s = 0.0
        """The least of them."""

    def order(self, engines: Iterable[Engine]) -> list[Engine]:
        """Those first that could not run when they last looked, then the others by their time."""
        engines = list(engines)
        able = [engine for engine in engines if engine.has_work and not engine.is_stalled]
        self._virtual_s = {e: max(self._virtual_s.get(e, 0.0), self._now_s) for e in able}
        self._now_s = min(self._virtual_s.values(), default=self._now_s)
        return sorted(engines, key=lambda engine: self._virtual_s.get(engine, -1.0))

    def charge(self, engine: Engine, seconds: float) -> None:
        """A step of it took so long."""
        start_s = self._virtual_s.get(engine, self._now_s)
        self._virtual_s[engine] = start_s + seconds / max(engine.weight, 1)
