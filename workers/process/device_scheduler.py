"""Chooses the model whose engine runs the next step, so that models share the device by weight.

Each engine has a virtual time, which is the total seconds of its steps divided by its weight. The
engine with the lowest virtual time runs next. When an engine can run again, after it was idle or
its weights or adapters were not loaded, its virtual time is raised to the lowest virtual time of
the other engines, so that it gets no credit for the time when it did not run.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.execution.engine import Engine


class DeviceScheduler:
    """Scheduler that orders engines by virtual time."""

    def __init__(self) -> None:
        self._virtual_s: dict[Engine, float] = {}
        """Virtual time, in seconds, of each engine that could run at the last call of `order`."""
        self._now_s = 0.0
        """Lowest virtual time of the engines that can run."""

    def order(self, engines: Iterable[Engine]) -> list[Engine]:
        """Returns the engines by virtual time. Engines that could not run at their last step are
        first."""
        engines = list(engines)
        able = [engine for engine in engines if engine.has_work and not engine.is_stalled]
        self._virtual_s = {e: max(self._virtual_s.get(e, 0.0), self._now_s) for e in able}
        self._now_s = min(self._virtual_s.values(), default=self._now_s)
        return sorted(engines, key=lambda engine: self._virtual_s.get(engine, -1.0))

    def charge(self, engine: Engine, seconds: float) -> None:
        """Adds a step's duration to the engine's virtual time."""
        start_s = self._virtual_s.get(engine, self._now_s)
        self._virtual_s[engine] = start_s + seconds / max(engine.weight, 1)
