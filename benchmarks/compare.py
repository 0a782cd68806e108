"""`python -m benchmarks.compare CHECKOUT`: compares the speed of another checkout with this one's.

Both checkouts are served at the same time, as `loraplex serve` starts them, from one Python
environment. Each round sends the same load to both, one after the other, and the order alternates
between rounds, so that changes of the machine's speed affect both. Each round gives one ratio, and
above 1, this checkout is faster. A ratio is dropped, and taken again, if the machine's multiply
rate changed by more than a third in between. Every round has new prompts, so that prefix caches
have no effect.
After half of the rounds, both are started again in the opposite order, because the server that is
started first is slower: with one row by 8 %, even if both checkouts are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from adapters.manifest import BaseModelShape
from adapters.store.folder import LocalStore
from benchmarks.load import Job, figures_of, run_load
from benchmarks.machine import SpeedProbe, describe
from benchmarks.steady import COLUMNS, EXPLANATION, Samples
from tests.doubles import write_adapter
from tests.e2e.demo import NAME, gguf
from tests.stack import Stack, running
from workers.importer import import_model

RANKS = (8, 8, 16, 16, 32, 32, 64, 64)
ROOT = Path(__file__).parents[1]

console = Console(width=150)


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a round: `num_requests` requests with random token ids, `concurrency` at a time."""

    name: str
    has_adapters: bool
    num_prompt: int
    num_output: int
    num_requests: int
    concurrency: int

    def jobs(self, adapters: list[str], seed: object, vocab_size: int) -> list[Job]:
        rng = random.Random(f"{self.name} {seed}")
        models = adapters if self.has_adapters else [NAME]
        return [
            Job(
                models[number % len(models)],
                [rng.randrange(100, vocab_size) for _ in range(self.num_prompt)],
                self.num_output,
            )
            for number in range(self.num_requests)
        ]


LOADS = (
    Load("decode, 1 row, base", False, 32, 96, 1, 1),
    Load("decode, 8 rows, base", False, 32, 64, 8, 8),
    Load("decode, 32 rows, base", False, 32, 48, 32, 32),
    Load("decode, 1 row, adapter", True, 32, 96, 1, 1),
    Load("decode, 8 rows, 8 adapters", True, 32, 64, 8, 8),
    Load("decode, 32 rows, 8 adapters", True, 32, 48, 32, 32),
    Load("prefill, 4 prompts of 512", False, 512, 1, 4, 4),
)
REQUESTS = Load("requests", True, 16, 1, 96, 8)
"""Load of small requests, for the gateway's CPU time per request."""


class Side:
    """Checkout that is served with the demo model and eight adapters."""

    def __init__(self, checkout: Path, folder: Path, model: Path, unset: list[str]) -> None:
        """`unset`: environment variables that `Stack` sets and that this checkout does not know."""
        without = [part for name in unset for part in ("-u", name)]
        self.stack = Stack(
            folder,
            "--model",
            f"{NAME}={model}",
            command=("env", *without, f"PYTHONPATH={checkout}", sys.executable, "-m", "loraplex"),
            cwd=checkout,
            memory="512MiB",
            dtype="bfloat16",
            max_num_seqs=64,
        )
        self._key = ""

    def push(self, adapters: dict[str, Path]) -> None:
        self._key = self.stack.create_tenant("bench")
        for name, folder in adapters.items():
            self.stack.push(folder, name, "bench")

    def tokens_per_s(self, load: Load, jobs: list[Job]) -> float:
        outcomes = asyncio.run(run_load(self.stack.url, self._key, jobs, load.concurrency))
        return figures_of(outcomes).total_per_s

    def requests_per_cpu_s(self, load: Load, jobs: list[Job]) -> float:
        """Sends the jobs. Returns the number of requests per second of the gateway's CPU time."""
        gateway = self._gateway()
        before = sum(gateway.cpu_times()[:2])
        asyncio.run(run_load(self.stack.url, self._key, jobs, load.concurrency))
        return len(jobs) / (sum(gateway.cpu_times()[:2]) - before)

    def _gateway(self) -> psutil.Process:
        children = psutil.Process(self.stack.pid).children(recursive=True)
        return next(child for child in children if "gateway" in child.cmdline())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="part of a load's name")
    parser.add_argument(
        "--unset", nargs="*", default=[], help="LORAPLEX_* variables that it does not know"
    )
    parser.add_argument("--json", type=Path, help="write every round's ratio there too")
    arguments = parser.parse_args()
    ratios: dict[str, Samples] = defaultdict(Samples)
    probe = SpeedProbe()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digest = import_model(gguf(), LocalStore(folder / "store"))
        model = folder / "store" / "models" / digest
        config = json.loads((model / "config.json").read_text())
        shape = BaseModelShape.from_config(config, digest)
        adapters = {
            f"a{i}-r{rank}": write_adapter(shape, folder / f"a{i}", rank=rank, seed=i)
            for i, rank in enumerate(RANKS)
        }
        for half in track((0, 1), "halves of the rounds", console=console):
            sides = (
                Side(ROOT, folder / f"this{half}", model, []),
                Side(arguments.checkout.resolve(), folder / f"other{half}", model, arguments.unset),
            )
            with ExitStack() as stack:
                for side in sides[:: -1 if half else 1]:
                    stack.enter_context(running(side.stack))
                    side.push(adapters)
                for i, round_number in enumerate((-1, *range(half, arguments.rounds, 2))):
                    order = sides[:: 1 if i % 2 else -1]
                    for load in (*LOADS, REQUESTS):
                        if arguments.only not in load.name:
                            continue
                        ratio = partial(
                            measure_ratio,
                            *(sides, order, load, list(adapters), shape.vocab_size, round_number),
                        )
                        if round_number < 0:  # the first round is a warm-up
                            ratio(0)
                        else:
                            ratios[load.name].take(ratio, probe)
    show(ratios)
    if arguments.json is not None:
        report = {name: asdict(samples) for name, samples in ratios.items()}
        arguments.json.write_text(json.dumps({"machine": describe(), "ratios": report}, indent=1))


def measure_ratio(
    sides: tuple[Side, Side],
    order: Sequence[Side],
    load: Load,
    adapters: list[str],
    vocab_size: int,
    round_number: int,
    attempt: int,
) -> float:
    """Sends the load to both sides in this order. Returns the first side's rate, divided by the
    second side's rate. Each attempt of a round has its own prompts."""
    jobs = load.jobs(adapters, (round_number, attempt), vocab_size)
    measure: Callable[[Side, Load, list[Job]], float] = (
        Side.requests_per_cpu_s if load is REQUESTS else Side.tokens_per_s
    )
    rates = {side: measure(side, load, jobs) for side in order}
    return rates[sides[0]] / rates[sides[1]]


def show(ratios: dict[str, Samples]) -> None:
    console.print(describe())
    table = Table(title="this checkout's speed / the other's", caption=EXPLANATION)
    for column in ("load", "median", "quartiles", "least", "most", *COLUMNS):
        table.add_column(column, justify="left" if column == "load" else "right")
    for name, samples in ratios.items():
        label = "gateway's requests a CPU second" if name == REQUESTS.name else name
        cells = [""] * 4
        if samples.values:
            least, low, median, high, most = np.percentile(samples.values, [0, 25, 50, 75, 100])
            cells = [
                *(f"{median:.3f}", f"{low:.3f} to {high:.3f}"),
                *(f"{least:.3f}", f"{most:.3f}"),
            ]
        table.add_row(label, *cells, *samples.cells())
    console.print(table)


if __name__ == "__main__":
    main()
