"""`python -m benchmarks.residency`: measures how loads of adapters slow down requests of loaded
adapters.

Uses one worker without a gateway (lone_worker.py). Each comparison alternates between its two sides
in one run, so that other load on the machine affects both. `--small` only checks that everything
runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from adapters.reference import AdapterRef
from benchmarks.lone_worker import RANK, House, Stream, Worker
from benchmarks.machine import describe

COLD_PER_S = 10.0

console = Console()


@dataclass(frozen=True)
class Sizes:
    """Sizes of the comparisons. The first compares `num_registered` adapters with `num_few`, with
    `rounds` rounds of `requests` requests for each."""

    num_registered: int
    num_few: int = 8
    room: int = 128
    rounds: int = 5
    requests: int = 128
    concurrency: int = 32
    num_output: int = 64
    cold_s: float = 20.0
    num_ttft: int = 60


FULL = Sizes(1000)
SMALL = Sizes(
    60, room=24, rounds=1, requests=16, concurrency=8, num_output=8, cold_s=6.0, num_ttft=8
)


def zipf(rng: random.Random, refs: list[AdapterRef]) -> Callable[[], AdapterRef]:
    weights = [1 / (rank + 1) for rank in range(len(refs))]
    return lambda: rng.choices(refs, weights)[0]


async def many_registered(house: House, sizes: Sizes) -> dict[str, Any]:
    """(a) Requests whose adapters are chosen by Zipf(1) among all adapters, compared with a choice
    among a few. All adapters are in host memory."""
    rates: dict[int, list[float]] = {sizes.num_few: [], sizes.num_registered: []}
    async with house.worker(room=sizes.room, host=sizes.num_registered) as worker:
        await worker.bring_to_host(house.refs[: sizes.num_registered])
        for round_ in range(sizes.rounds + 1):
            for count, seen in rates.items():
                choose = zipf(random.Random(round_), house.refs[:count])
                rate = await worker.closed_loop(
                    choose, sizes.requests, sizes.concurrency, sizes.num_output
                )
                if round_ > 0:  # the first round is a warm-up
                    seen.append(rate)
        assert worker.client.status is not None
        evictions = worker.client.status.models[0].num_adapter_evictions
    few, many = (float(np.median(rates[count])) for count in rates)
    return {
        f"tokens/s with {sizes.num_few} registered": few,
        f"tokens/s with {sizes.num_registered} registered": many,
        "rounds": sizes.rounds,
        "evictions": evictions,
        "ratio (asked: >= 0.90)": many / few,
    }


async def cold_beside_warm(house: House, sizes: Sizes) -> dict[str, Any]:
    """(b) Eight streams of loaded adapters, while ten short requests per second use either the same
    adapters, or adapters that must be loaded from the disk cache."""
    gaps: dict[str, list[float]] = {"warm": [], "cold": []}
    warm, cold = house.refs[:8], house.refs[8:]
    turns = {"warm": _in_turn(warm), "cold": _in_turn(cold)}
    async with house.worker(room=16, host=16) as worker:
        for ref in warm:
            await worker.ask(ref, 4, 2)
        for _ in range(sizes.rounds):
            for kind, seen in gaps.items():
                seen += await _gaps_beside(worker, warm, turns[kind], sizes.cold_s / sizes.rounds)
    p50, p99 = (
        {kind: float(np.percentile(seen, q)) * 1e3 for kind, seen in gaps.items()} for q in (50, 99)
    )
    return {
        "ITL p50 ms beside warm / cold": (p50["warm"], p50["cold"]),
        "ITL p99 ms beside warm / cold": (p99["warm"], p99["cold"]),
        "samples": tuple(len(seen) for seen in gaps.values()),
        "p99 ratio (asked: <= 1.25)": p99["cold"] / p99["warm"],
    }


def _in_turn(refs: list[AdapterRef]) -> Iterator[AdapterRef]:
    while True:
        yield from refs


async def _gaps_beside(
    worker: Worker, warm: list[AdapterRef], others: Iterator[AdapterRef], seconds: float
) -> list[float]:
    """Returns the inter-token gaps of streams of the `warm` adapters, while ten requests per second
    use `others`."""
    until = time.perf_counter() + seconds
    short: list[asyncio.Task[Stream]] = []

    async def streams(ref: AdapterRef) -> list[float]:
        gaps: list[float] = []
        while time.perf_counter() < until:
            gaps += np.diff((await worker.ask(ref, 32, 64)).arrivals_s).tolist()
        return gaps

    async def arrivals() -> None:
        due = time.perf_counter()
        while (due := due + 1 / COLD_PER_S) < until:
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            short.append(asyncio.create_task(worker.ask(next(others), 4, 1)))

    results = await asyncio.gather(*(streams(ref) for ref in warm), arrivals())
    await asyncio.gather(*short)
    return [gap for gaps in results[:-1] if gaps for gap in gaps]


async def cold_first_token(house: House, sizes: Sizes) -> dict[str, Any]:
    """(c) Time to the first token of an adapter that is only in host memory, and of an adapter on
    the device, while four streams run."""
    ttft: dict[str, list[float]] = {"device": [], "host": []}
    background, rest = house.refs[:4], house.refs[4:]
    warm, cold = rest[0], _in_turn(rest[1:50])
    async with house.worker(room=16, host=60) as worker:
        await worker.bring_to_host(rest[:50])
        await worker.ask(warm, 4, 2)
        is_over = asyncio.Event()

        async def stream(ref: AdapterRef) -> None:
            while not is_over.is_set():
                await worker.ask(ref, 32, 64)

        running = [asyncio.create_task(stream(ref)) for ref in background]
        await asyncio.sleep(1.0)
        for _ in range(sizes.num_ttft):
            for kind in ttft:
                await asyncio.sleep(worker.rng.uniform(0.02, 0.08))
                ref = warm if kind == "device" else next(cold)
                ttft[kind].append((await worker.ask(ref, 4, 1)).ttft_s)
        steps = worker.steps()[-1000:]
        is_over.set()
        await asyncio.gather(*running)
    medians = {kind: float(np.median(seen)) * 1e3 for kind, seen in ttft.items()}
    p90 = {kind: float(np.percentile(seen, 90)) * 1e3 for kind, seen in ttft.items()}
    step, copy = float(np.median(steps)) / 1e3, house.copy_s * 1e3
    return {
        "TTFT ms median device / host": (medians["device"], medians["host"]),
        "TTFT ms p90 device / host": (p90["device"], p90["host"]),
        "samples of each": sizes.num_ttft,
        "median step ms, copy ms": (step, copy),
        "added ms (asked: <= one step + copy)": medians["host"] - medians["device"],
        "added / (step + copy)": (medians["host"] - medians["device"]) / (step + copy),
    }


SCENARIOS = {"registered": many_registered, "cold": cold_beside_warm, "ttft": cold_first_token}


def show(name: str, scenario: Callable[..., Any], values: dict[str, Any]) -> None:
    console.print(f"[bold]{name}[/bold] {scenario.__doc__}")
    for label, value in values.items():
        parts = value if isinstance(value, tuple) else (value,)
        console.print(f"    {label}: " + " / ".join(f"{part:.5g}" for part in parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SCENARIOS, help="one of the three")
    parser.add_argument("--small", action="store_true", help="a trial; its figures mean nothing")
    parser.add_argument("--threads", type=int, help="kernel threads of the worker")
    parser.add_argument("--json", type=Path, help="write everything there too")
    arguments = parser.parse_args()
    sizes = SMALL if arguments.small else FULL
    console.print(describe())
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        with console.status(f"packing {sizes.num_registered} adapters"):
            house = House(Path(folder), sizes.num_registered, arguments.threads)
        console.print(f"rank {RANK} adapters of {house.image_bytes / 1e6:.2f} MB")
        for name, scenario in SCENARIOS.items():
            if arguments.only in (None, name):
                results[name] = asyncio.run(scenario(house, sizes))
                show(name, scenario, results[name])
    if arguments.json is not None:
        document = {"machine": describe(), "results": results}
        arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
