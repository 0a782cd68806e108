"""`python -m benchmarks.gaps`: measures gaps between tokens of streams beside prompts, and what
short gaps cost in throughput and in time to first token.

The demo model is served through HTTP as `loraplex serve` starts it. With `--paced`, a tiny model is
served whose steps take as long as on a large GPU (tests/e2e/paced_worker.py).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from adapters.store.folder import LocalStore
from benchmarks.load import TIMEOUT_S, Job, figures_of
from benchmarks.machine import describe
from loraplex.load.client import Call, Client, Outcome
from loraplex.load.loops import closed_loop
from tests.e2e.demo import NAME, gguf
from tests.e2e.shares import ORDINARY, paced
from tests.e2e.tiny import NAME as TINY
from tests.stack import PLAIN, Stack, running
from workers.importer import import_model

NUM_PROMPT, NUM_OUTPUT = 64, 128
"""Tokens of a stream's prompt and answer."""
LENGTHS = (1024, 2048, 4096, 8000)
"""Tokens of the prompts beside streams. Their answers have one token."""
PROMPT_PART = 0.2
"""Part of the time for which an idle server would compute the prompts that come now and then."""

console = Console()


@dataclass(frozen=True, slots=True)
class Case:
    """Load of `num_streams` streams at a time. num_prompts: number of prompts that are always
    pending beside them; 0 if there are none, None if prompts come now and then."""

    name: str
    num_streams: int
    num_prompts: int | None = 0
    num_prompt: int = NUM_PROMPT
    num_output: int = NUM_OUTPUT


CASES = (
    Case("32 streams", 32),
    Case("8 streams, prompts of 1,024", 8, num_prompt=1024, num_output=16),
    Case("8 streams, long prompts at times", 8, None),
    Case("32 streams, long prompts at times", 32, None),
    Case("8 streams, 2 long prompts at all times", 8, 2),
    Case("32 streams, 2 long prompts at all times", 32, 2),
)


@dataclass(frozen=True, slots=True)
class Server:
    """Server with the name and the vocabulary of its model."""

    url: str
    key: str
    model: str
    vocab: range

    def calls(
        self, rng: random.Random, lengths: tuple[int, ...], num_output: int
    ) -> Iterator[Call]:
        """Yields requests with random prompts of each length in turn."""
        while True:
            for length in lengths:
                prompt = [rng.choice(self.vocab) for _ in range(length)]
                yield Job(self.model, prompt, num_output).call(self.key)


async def measure(
    server: Server, case: Case, seconds: float, seed: int
) -> tuple[list[Outcome], list[Outcome]]:
    """Returns the outcomes of the streams, and of the prompts beside them."""
    streams: list[Outcome] = []
    prompts: list[Outcome] = []
    calls = server.calls(random.Random(seed), (case.num_prompt,), case.num_output)
    beside = server.calls(random.Random(-1 - seed), LENGTHS, 1)
    async with Client(server.url, timeout_s=TIMEOUT_S) as client:
        interval_s = 0.0
        if case.num_prompts is None:
            begin_s = time.perf_counter()
            await closed_loop(client, (next(beside) for _ in LENGTHS), 1, prompts.append)
            interval_s = (time.perf_counter() - begin_s) / len(LENGTHS) / PROMPT_PART
            prompts.clear()

        async def send_at_times() -> None:
            stop_s = time.perf_counter() + seconds
            async with asyncio.TaskGroup() as tasks:
                while time.perf_counter() < stop_s:
                    task = tasks.create_task(client.send(next(beside)))
                    task.add_done_callback(lambda done: prompts.append(done.result()))
                    await asyncio.sleep(interval_s)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                closed_loop(client, calls, case.num_streams, streams.append, seconds=seconds)
            )
            if case.num_prompts is None:
                tasks.create_task(send_at_times())
            elif case.num_prompts:
                tasks.create_task(
                    closed_loop(client, beside, case.num_prompts, prompts.append, seconds=seconds)
                )
    if failed := [outcome for outcome in streams + prompts if outcome.error]:
        raise RuntimeError(f"{failed[0].error}: {failed[0].message}")
    return streams, prompts


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    digest = import_model(gguf(), LocalStore(folder / "store"))
    model = folder / "store" / "models" / digest
    options = "--model", f"{NAME}={model}"
    stack = Stack(
        folder / "data", *options, command=PLAIN, memory="1GiB", dtype="bfloat16", max_num_seqs=64
    )
    with running(stack):
        yield Server(stack.url, stack.create_tenant("bench"), NAME, range(100, 49_000))


async def run_paced(folder: Path, pattern: str, rounds: int, seconds: float) -> Table:
    settings = {"max_num_seqs": 64, "max_batched_tokens": 2048, "max_model_len": 8192}
    async with paced(folder, **settings) as (cluster, url):
        server = Server(url, cluster.keys[ORDINARY[0]], TINY, range(256))
        return await run(server, pattern, rounds, seconds)


async def run(server: Server, pattern: str, rounds: int, seconds: float) -> Table:
    table = Table(title="gaps between tokens of streams and times to first token, in ms")
    for column in ("case", "gap p50", "p99", "p99 / p50", "tokens/s"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for column in ("first token of streams p50/p99", "of long prompts p50/p99"):
        table.add_column(column, justify="right")
    for case in (case for case in CASES if pattern in case.name):
        for number in range(rounds):
            streams, prompts = await measure(server, case, seconds, number)
            figures, beside = figures_of(streams), figures_of(prompts)
            gaps, first = figures.itl_ms, figures.ttft_ms
            assert gaps is not None and first is not None
            table.add_row(
                case.name,
                f"{gaps.p50:.1f}",
                f"{gaps.p99:.1f}",
                f"{gaps.p99 / gaps.p50:.2f}",
                f"{figures_of(streams + prompts).total_per_s:.0f}",
                f"{first.p50:.0f}/{first.p99:.0f}",
                ""
                if beside.ttft_ms is None
                else f"{beside.ttft_ms.p50:.0f}/{beside.ttft_ms.p99:.0f}",
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--paced", action="store_true", help="serve a tiny model with paced steps")
    parser.add_argument("--rounds", type=int, default=1, help="rows of each case (default: 1)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a round (default: 20)")
    options = parser.parse_args()
    arguments = options.only, options.rounds, options.seconds
    with tempfile.TemporaryDirectory() as name:
        if options.paced:
            table = asyncio.run(run_paced(Path(name), *arguments))
        else:
            with served(Path(name)) as server:
                table = asyncio.run(run(server, *arguments))
    console.print(describe())
    console.print(table)


if __name__ == "__main__":
    main()
