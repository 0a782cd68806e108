"""Takes samples while the speed of the machine is steady. Neighbours of a virtual machine can
change its speed several times within minutes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.machine import Speed

ATTEMPTS = 3
"""Maximum number of times that a sample is taken."""
COLUMNS = ("reads GB/s", "multiplies GFLOP/s", "samples", "dropped")
"""Columns of a table, in the order of `Samples.cells`."""
EXPLANATION = (
    "reads, multiplies: medians just before and just after the samples. dropped: samples that were "
    "not used, because the multiply rate changed by more than a third. Each is taken at most "
    f"{ATTEMPTS} times."
)


def is_steady(before: Speed, after: Speed) -> bool:
    """Returns whether the smaller multiply rate is at least two thirds of the larger one."""
    small, large = sorted((before.multiply, after.multiply))
    return 3 * small >= 2 * large


@dataclass(slots=True)
class Samples:
    """Samples of one figure, each with the machine's speed just before and just after it.
    num_dropped: number of samples that were not used, because the speed changed."""

    values: list[float] = field(default_factory=list[float])
    before: list[Speed] = field(default_factory=list[Speed])
    after: list[Speed] = field(default_factory=list[Speed])
    num_dropped: int = 0

    def take(self, measure: Callable[[int], float], probe: Callable[[], Speed]) -> None:
        """Adds a sample. If the speed changed, takes it again, at most `ATTEMPTS` times in total,
        and then adds none. measure: returns the sample; its argument is the number of attempts
        before this one."""
        for attempt in range(ATTEMPTS):
            before = probe()
            value = measure(attempt)
            after = probe()
            if is_steady(before, after):
                self.values.append(value)
                self.before.append(before)
                self.after.append(after)
                return
            self.num_dropped += 1

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of `COLUMNS`."""
        return (
            _spread(*([speed.read for speed in part] for part in (self.before, self.after))),
            _spread(*([speed.multiply for speed in part] for part in (self.before, self.after))),
            str(len(self.values)),
            str(self.num_dropped),
        )


def _spread(before: Sequence[float], after: Sequence[float]) -> str:
    if not before:
        return ""
    return f"{median(before) / 1e9:.1f}, {median(after) / 1e9:.1f}"
