"""`python -m benchmarks.busy_neighbour`: measures decode steps while other processes keep cores
busy.

Runs the engine's steps without HTTP, alternately with a fixed number of kernel threads and with a
number that adapts to the load of the machine. Both are measured alone, and next to busy processes
of equal priority. Rates are medians of the rounds. The column p99 / p50 is the 99th percentile of
the step times of all rounds, divided by their median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import Process
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from adapters.store.folder import LocalStore
from benchmarks.machine import describe
from ops.cpu import CpuOps
from ops.scheduler_times import SchedulerTimes
from ops.thread_count import ThreadCount
from tests.workers.paged import PagedModel, Stream
from tests.workers.real_model import demo_gguf
from workers.importer import import_model
from workers.models.loading import load_model
from workers.models.plan import ModelPlan

ROWS = (1, 8, 32)
CONTEXT = 256
"""Number of tokens after which the sequences are replaced by new ones."""


class FixedCount(ThreadCount):
    """Number of threads that never changes."""

    def record_step(self, begin: float, end: float) -> int:
        return self.limit


def spin() -> None:
    while True:
        sum(range(100_000))


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    processes = [Process(target=spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def steps(model: PagedModel, rows: int, seconds: float) -> list[float]:
    """Runs decode steps of `rows` sequences for `seconds`. Returns the duration of each step."""
    end, taken, streams = time.perf_counter() + seconds, list[float](), list[Stream]()
    while time.perf_counter() < end:
        if not streams or streams[0].length >= CONTEXT:
            give_back(model, streams)
            streams = [Stream() for _ in range(rows)]
            model.step([(stream, list(range(100, 116))) for stream in streams])
        begin = time.perf_counter()
        model.step([(stream, [200]) for stream in streams])
        taken.append(time.perf_counter() - begin)
    give_back(model, streams)
    return taken


def give_back(model: PagedModel, streams: list[Stream]) -> None:
    for stream in streams:
        model.free += stream.pages


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--neighbours", type=int, default=1, help="busy processes")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(arguments.threads)
    ops = CpuOps(threads=arguments.threads)
    taken: dict[tuple[int, int, bool], list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        digest = import_model(demo_gguf(), LocalStore(Path(folder)))
        plan = ModelPlan.read(Path(folder) / "models" / digest, digest, torch.bfloat16, 1024)
        model = PagedModel(load_model(plan, ops), ops, max(ROWS) * CONTEXT // 16)
        for _ in range(arguments.rounds):
            for count in (0, arguments.neighbours):
                with ExitStack() as stack:
                    stack.enter_context(neighbours(count))
                    for rows in ROWS:
                        for follows in (False, True):
                            kind = ThreadCount if follows else FixedCount
                            ops.threads = kind(arguments.threads, SchedulerTimes(), ops.team_ids)
                            found = steps(model, rows, arguments.seconds)
                            taken.setdefault((count, rows, follows), []).append(found)
    show(taken, arguments)


def show(
    taken: dict[tuple[int, int, bool], list[list[float]]], arguments: argparse.Namespace
) -> None:
    console = Console(width=120)
    load = os.getloadavg()[1]
    console.print(f"{describe()}; load average over five minutes at the end {load:.0f}")
    table = Table(title="decode steps of SmolLM2-135M in bfloat16")
    for name in ("busy processes", "rows", "threads", "tokens/s", "p50 ms", "p99 / p50"):
        table.add_column(name, justify="right")
    for (count, rows, follows), rounds in sorted(taken.items()):
        rate = statistics.median(rows * len(each) / sum(each) for each in rounds)
        median, last = np.percentile([value for each in rounds for value in each], [50, 99])
        threads = "follows" if follows else f"{arguments.threads}"
        cells = (f"{rate:.0f}", f"{median * 1e3:.1f}", f"{last / median:.1f}")
        table.add_row(str(count), str(rows), threads, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
