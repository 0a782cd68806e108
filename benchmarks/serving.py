"""`python -m benchmarks.serving`: measures the demo model under load, through HTTP, on this
machine.

Every case runs on the whole product as `loraplex serve` starts it: gateway, Postgres and worker are
separate processes, and answers are streamed. The load generator runs on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from adapters.manifest import PROJECTIONS, BaseModelShape
from adapters.store.folder import LocalStore
from benchmarks.load import Job, figures_of, run_load
from benchmarks.machine import describe, read_bandwidth
from benchmarks.peft_baseline import run_peft
from loraplex.load.figures import Figures, Percentiles
from tests.doubles import write_adapter
from tests.e2e.demo import NAME, gguf
from tests.stack import PLAIN, Stack, running
from tests.worker_state import worker_steps
from workers.importer import import_model

RANKS = {
    "base": [],
    "E": [8, 8, 16, 16, 32, 32, 64, 64],
    "T": [8] * 16 + [16] * 8 + [32] * 4 + [64] * 4,
}
STEP_PARTS = ("schedule_us", "build_us", "forward_us", "sample_us", "update_us")

console = Console()


@dataclass
class Case:
    """Workload. `ranks` names the set of adapters in `RANKS`, `num_prompt` and `num_output` are
    tokens per request, and `concurrency` is the number of requests at a time."""

    name: str
    ranks: str
    num_prompt: int
    num_output: int
    num_requests: int
    concurrency: int
    goal: str = ""
    shared_prefix: int = 0


@dataclass
class Result:
    case: Case
    figures: Figures
    step_us: dict[str, float] = field(default_factory=dict)
    adapters_per_step: float = 0.0
    memory_bytes: int = 0


CASES = [
    Case("decode", "base", 64, 128, 8, 1, ">= 110"),
    Case("decode", "base", 64, 128, 64, 8, ">= 450"),
    Case("decode", "base", 64, 128, 64, 32, ">= 900"),
    Case("decode", "E", 64, 128, 8, 1),
    Case("decode", "E", 64, 128, 64, 8, ">= 350"),
    Case("decode", "E", 64, 128, 64, 32, ">= 780"),
    Case("decode", "T", 64, 128, 64, 32, ">= 650"),
    Case("prefill", "base", 1024, 16, 24, 8, ">= 2500 total"),
    Case("prefill", "E", 1024, 16, 24, 8, ">= 0.85 of base"),
    Case("shared prefix", "E", 832, 32, 48, 8, "reused", shared_prefix=768),
]


def make_jobs(case: Case, models: list[str], vocab_size: int, seed: object = 0) -> list[Job]:
    """Returns requests with random token ids, whose models take turns. If the case has a shared
    prefix, all prompts of a model begin with the same random tokens."""
    rng = random.Random(f"{case.name} {case.ranks} {case.concurrency} {seed}")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, vocab_size) for _ in range(count)]

    prefixes = {model: tokens(case.shared_prefix) for model in models}
    jobs: list[Job] = []
    for number in range(case.num_requests):
        model = models[number % len(models)]
        prompt = prefixes[model] + tokens(case.num_prompt - case.shared_prefix)
        jobs.append(Job(model, prompt, case.num_output))
    return jobs


class Bench:
    """Stack that serves the demo model with the adapters of all sets. `kept` has .gguf files by
    name, which are served as additional models in their own weight format."""

    def __init__(
        self,
        folder: Path,
        *,
        memory: str,
        threads: int | None,
        kept: Mapping[str, Path] | None = None,
    ) -> None:
        store = LocalStore(folder / "store")
        digest = import_model(gguf(), store)
        self.model = folder / "store" / "models" / digest
        config = json.loads((self.model / "config.json").read_text())
        self.shape = BaseModelShape.from_config(config, digest)
        settings: dict[str, Any] = {"memory": memory, "dtype": "bfloat16", "max_num_seqs": 64}
        if threads is not None:
            settings["threads"] = threads
        self._kept = kept or {}
        model = f"{NAME}={self.model}"
        self.stack = Stack(folder / "data", "--model", model, command=PLAIN, **settings)
        self.folders: dict[str, dict[str, Path]] = {}
        for name, ranks in RANKS.items():
            self.folders[name] = {
                f"{name.lower()}{i}-r{rank}": write_adapter(
                    self.shape, folder / "adapters" / f"{name}{i}", rank=rank, seed=i
                )
                for i, rank in enumerate(ranks)
            }
        self.key = ""

    def push(self) -> None:
        """Adds the kept models and all adapters to the running stack."""
        self.key = self.stack.create_tenant("bench")
        for name, source in self._kept.items():
            self.stack.cli("model", "add", f"{name}={source}", "--weight-format", "keep")
            self._wait_until_served(name)
        for adapters in self.folders.values():
            for name, folder in adapters.items():
                self.stack.push(folder, name, "bench", model=NAME)

    def _wait_until_served(self, model: str) -> None:
        end = time.monotonic() + 60
        while True:
            try:
                asyncio.run(run_load(self.stack.url, self.key, [Job(model, [1, 2], 2)], 1))
                return
            except ExceptionGroup:  # `no_worker`, until the model is loaded
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def run(self, case: Case) -> Result:
        models = list(self.folders[case.ranks]) or [NAME]
        jobs = make_jobs(case, models, self.shape.vocab_size)
        warm = [Job(model, [1, 2, 3, 4], 2) for model in models]
        asyncio.run(run_load(self.stack.url, self.key, warm, 1))
        before = worker_steps(self.stack)["step"][-1]
        outcomes = asyncio.run(run_load(self.stack.url, self.key, jobs, case.concurrency))
        steps = worker_steps(self.stack)
        mine = np.array(steps["step"]) > before
        means = {part: float(np.array(steps[part])[mine].mean()) for part in STEP_PARTS}
        adapters = float(np.array(steps["num_adapters"])[mine].mean())
        return Result(case, figures_of(outcomes), means, adapters, self.memory_bytes())

    def memory_bytes(self) -> int:
        """Returns the total proportional set size of the product's processes, including
        Postgres."""
        root = psutil.Process(self.stack.pid)
        processes = [root, *root.children(recursive=True)]
        return sum(process.memory_full_info().pss for process in processes)


def show(results: list[Result]) -> None:
    table = Table(title="tokens/s through HTTP, streamed; times in ms")
    columns = ("case", "adapters", "in/out", "conc.", "out/s", "total/s", "goal", "cached")
    for column in (*columns, "TTFT p50/p90/p99", "ITL p50/p90/p99", "step", "memory"):
        table.add_column(column, justify="right")
    for result in results:
        case, figures = result.case, result.figures
        step_ms = sum(result.step_us.values()) / 1000
        table.add_row(
            case.name,
            case.ranks,
            f"{case.num_prompt}/{case.num_output}",
            str(case.concurrency),
            f"{figures.output_per_s:.0f}",
            f"{figures.total_per_s:.0f}",
            case.goal,
            f"{figures.cached_tokens / figures.prompt_tokens:.0%}",
            milliseconds(figures.ttft_ms),
            milliseconds(figures.itl_ms),
            f"{step_ms:.1f}",
            f"{result.memory_bytes / 2**30:.2f} GiB",
        )
    console.print(table)


def milliseconds(times: Percentiles | None) -> str:
    return "" if times is None else f"{times.p50:.0f}/{times.p90:.0f}/{times.p99:.0f}"


def show_steps(results: list[Result]) -> None:
    table = Table(title="mean microseconds of a step")
    for column in ("case", "adapters", "conc.", *STEP_PARTS):
        table.add_column(column.removesuffix("_us"), justify="right")
    for result in results:
        parts = [f"{result.step_us[part]:.0f}" for part in STEP_PARTS]
        case = result.case
        table.add_row(case.name, case.ranks, str(case.concurrency), *parts)
    console.print(table)


def show_lora_cost(results: list[Result], shape: BaseModelShape, bandwidth: float) -> None:
    """Prints the bytes of the adapters in a decode step, the time to read them at the machine's
    bandwidth, the time that LoRA adds to the step, and the ratio of the two times."""
    table = Table(title="what adapters add to a decode step")
    for column in (
        "adapters",
        "conc.",
        "base step ms",
        "step ms",
        "added ms",
        "MB read",
        "bytes ms",
        "added / bytes",
    ):
        table.add_column(column, justify="right")
    decodes = [r for r in results if r.case.name == "decode"]
    base = {r.case.concurrency: r for r in decodes if r.case.ranks == "base"}
    for result in decodes:
        if result.case.ranks == "base" or result.case.concurrency not in base:
            continue
        alone = sum(base[result.case.concurrency].step_us.values()) / 1000
        together = sum(result.step_us.values()) / 1000
        ranks = RANKS[result.case.ranks]
        per_adapter = sum(adapter_bytes(shape, rank) for rank in ranks) / len(ranks)
        num_bytes = result.adapters_per_step * per_adapter
        floor, added = num_bytes / bandwidth * 1000, together - alone
        values = (alone, together, added, num_bytes / 1e6, floor, added / floor)
        row = [f"{value:.2f}" for value in values]
        table.add_row(result.case.ranks, str(result.case.concurrency), *row)
    console.print(table)


def adapter_bytes(shape: BaseModelShape, rank: int) -> int:
    """Returns the bytes of an adapter of this rank on all projections, in bfloat16."""
    widths = sum(sum(shape.projection_shape(0, projection)) for projection in PROJECTIONS)
    return 2 * rank * widths * shape.num_layers


def compare_with_peft(bench: Bench) -> dict[str, float]:
    """Runs static batches of 8 and 32 with transformers and peft. Returns the output tokens per
    second of each."""
    rates: dict[str, float] = {}
    for ranks, batch_size in (("base", 8), ("E", 8), ("E", 32)):
        models = list(bench.folders[ranks]) or [NAME]
        case = Case("decode", ranks, 64, 128, batch_size, batch_size)
        jobs = make_jobs(case, models, bench.shape.vocab_size)
        name = f"transformers + peft, {ranks}, batch {batch_size}"
        rates[name] = run_peft(bench.model, bench.folders[ranks], jobs, batch_size)
        console.print(f"{name}: {rates[name]:.0f} tokens/s")
    return rates


def select(pattern: str) -> Callable[[Case], bool]:
    return lambda case: pattern in f"{case.name} {case.ranks} c{case.concurrency}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of 'NAME RANKS cCONCURRENCY'")
    parser.add_argument("--memory", default="1GiB", help="arena of the worker")
    parser.add_argument("--threads", type=int, help="kernel threads of the worker")
    parser.add_argument("--no-peft", action="store_true", help="leave transformers + peft out")
    parser.add_argument("--json", type=Path, help="write everything there too")
    arguments = parser.parse_args()
    bandwidth = read_bandwidth()
    console.print(f"{describe()}; reads {bandwidth / 1e9:.1f} GB/s")
    results: list[Result] = []
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), memory=arguments.memory, threads=arguments.threads)
        with running(bench.stack):
            bench.push()
            for case in filter(select(arguments.only), CASES):
                with console.status(f"{case.name} {case.ranks}, concurrency {case.concurrency}"):
                    results.append(bench.run(case))
        show(results)
        show_steps(results)
        show_lora_cost(results, bench.shape, bandwidth)
        if not arguments.no_peft:
            rates = compare_with_peft(bench)
    if arguments.json is not None:
        document: dict[str, Any] = {"machine": describe(), "bandwidth": bandwidth, "peft": rates}
        document["results"] = [asdict(result) for result in results]
        arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
