"""`python -m benchmarks.fairness`: measures the cost of scheduling, and how fair it is.

Two parts use a simulated device: the scheduler's CPU time, and the time to first token of ordinary
tenants next to a heavy tenant. Two parts run the whole product: its behaviour at 0.5 to 5 times its
capacity, and three ordinary tenants next to one that requests ten times as much, with 50 adapters
and giant prompts. The whole product serves a tiny model, whose steps are slowed down to take as
long as on a large GPU (tests/e2e/paced_worker.py). `--small` only checks that everything runs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from tests.e2e.open_loop import p99
from tests.e2e.shares import (
    FEW_ROWS,
    GIANT,
    HEAVY,
    NUM_PROMPT,
    NUM_ROWS,
    ORDINARY,
    SHORT_QUEUE,
    Beside,
    heavy_tenant,
    load,
    measure_capacity,
    ordinary,
    p99_ttft,
    paced,
)
from tests.workers.counting import Market, StepCost
from tests.workers.scheduling.test_fairness import ask, service_gap
from tests.workers.simulation import StubPool
from workers.execution.step_builder import BlockTables, build_step_input
from workers.policies.queue_limits import QueueBounds

NUM_RUNNING, NUM_WAITING = 256, 1000

console = Console()


def scheduling_cost(*, is_blocked: bool) -> float:
    """Returns the milliseconds in which the scheduler plans a step, while 256 sequences generate
    and 1,000 wait. If `is_blocked` is set, the latter wait for adapters that never finish loading,
    otherwise for a free row."""
    rng = random.Random(0)
    market = Market(
        num_pages=60_000,
        max_num_seqs=2 * NUM_RUNNING if is_blocked else NUM_RUNNING,
        max_batched_tokens=2048,
        pool=StubPool(num_slots=1, delay_steps=1 << 30),
        bounds=QueueBounds(max_requests=1 << 20, max_wait_s=1e9),
    )
    for number in range(NUM_RUNNING):
        market.offer(ask(rng, f"t{number}", 20, 2000))
    for _ in range(10):
        market.step()
    for number in range(NUM_WAITING):
        adapter = f"a{number % 500}" if is_blocked else None
        market.offer(ask(rng, f"t{number % 200}", 100, 20, adapter=adapter))
    seconds: list[float] = []
    for _ in range(50):
        begin = time.perf_counter()
        schedule = market.scheduler.schedule(market.clock.now)
        seconds.append(time.perf_counter() - begin)
        tables, commands = BlockTables(market.kv.pool), market.scheduler.commands.take()
        step = build_step_input(schedule.items, tables, commands)
        output = market.runner.launch(step).result()
        market.scheduler.update(schedule, [len(result.tokens) for result in output.sequences])
        for item in schedule.items:
            item.sequence.tokens.append(0)
    return 1e3 * median(seconds)


NUM_OUTPUT = 48
ROW_S, PER_S = 1e-4, 2.5
"""ROW_S: seconds that each row adds to the 10 ms of a step on the simulated device. PER_S: requests
per second of an ordinary tenant, about a sixteenth of the device's capacity."""


@dataclass(frozen=True, slots=True)
class Heavy:
    """Tenant that sends ten times as many requests as an ordinary tenant."""

    share_of_giants: float
    num_adapters: int


def first_tokens(heavy: Heavy | None, seconds: float) -> list[float]:
    """Returns the milliseconds to the first token of each request of the ordinary tenants. The
    simulated device has 32 rows, chunks of 512 tokens and room for 8 adapters."""
    rng = random.Random(1)
    market = Market(
        num_pages=40_000,
        max_num_seqs=32,
        max_batched_tokens=512,
        cost=StepCost(row_s=ROW_S),
        pool=StubPool(num_slots=8, delay_steps=1),
    )
    due: list[tuple[float, str]] = []
    for who in (*ORDINARY, *(("heavy",) if heavy else ())):
        at_s, per_s = 0.0, PER_S * (10 if who == "heavy" else 1)
        while (at_s := at_s + rng.expovariate(per_s)) < seconds:
            due.append((at_s, who))
    due.sort(reverse=True)
    sent: dict[int, float] = {}
    while due:
        if not market.engine.has_work:
            market.clock.now = max(market.clock.now, due[-1][0])
        while due and due[-1][0] <= market.clock.now:
            at_s, who = due.pop()
            length, adapter = NUM_PROMPT, None
            if heavy and who == "heavy":
                length = GIANT if rng.random() < heavy.share_of_giants else NUM_PROMPT
                adapter = f"a{rng.randrange(heavy.num_adapters)}" if heavy.num_adapters else None
            request = ask(rng, who, length, NUM_OUTPUT, adapter=adapter)
            market.offer(request)
            if who != "heavy":
                sent[request.id] = at_s
        market.step()
    return [1e3 * (market.first_s[n] - at_s) for n, at_s in sent.items() if n in market.first_s]


def simulate_first_tokens(seconds: float) -> None:
    table = Table(title="ordinary tenants, simulated device", title_justify="left")
    for name in ("beside", "p50 TTFT ms", "p99 TTFT ms"):
        table.add_column(name, justify="right")
    for name, heavy in (
        ("nobody", None),
        ("ten times as much", Heavy(0.0, 0)),
        ("... of 50 adapters", Heavy(0.0, 50)),
        ("... and giant prompts", Heavy(0.25, 50)),
    ):
        found = first_tokens(heavy, seconds)
        table.add_row(name, f"{median(found):.0f}", f"{p99(found):.0f}")
    console.print(table)


async def overload(url: str, key: str, seconds: float) -> None:
    per_s = await measure_capacity(url, key, FEW_ROWS, seconds)
    table = Table(title=f"open loop, capacity {per_s:.1f} requests/s", title_justify="left")
    for name in ("load", "served/s", "p99 TTFT ms", "refused", "p99 refusal ms", "all told when"):
        table.add_column(name, justify="right")
    for times in (0.5, 0.8, 1.0, 2.0, 5.0):
        found = await load(url, key, times, per_s, seconds)
        table.add_row(
            f"{times:.1f}",
            f"{found.served_per_s:.1f}",
            f"{1e3 * found.p99_ttft_s:.0f}",
            str(found.num_refused),
            f"{1e3 * found.p99_refusal_s:.1f}",
            str(found.all_told_when),
        )
    console.print(table)


def shares(alone: list[Beside], beside: list[Beside], part: int) -> Table:
    """Returns a table of the ordinary tenants, which `alone` has without a heavy tenant. The last
    entry of `beside` is the heavy tenant."""
    *beside, heavy = beside
    title = f"ordinary tenants, 1/{part} of the capacity each, beside a heavy one"
    table = Table(title=title, title_justify="left")
    for name in ("tenant", "asked", "served", "share", "p99 TTFT ms", "alone", "ratio"):
        table.add_column(name, justify="right")
    for name, before, after in (
        *((a.who, [b], [a]) for b, a in zip(alone, beside, strict=True)),
        ("all", alone, beside),
    ):
        num_asked, num_served = sum(a.num_asked for a in after), sum(a.num_served for a in after)
        now_s, then_s = p99_ttft(after), p99_ttft(before)
        table.add_row(
            name,
            str(num_asked),
            str(num_served),
            f"{num_served / num_asked:.3f}",
            f"{1e3 * now_s:.0f}",
            f"{1e3 * then_s:.0f}",
            f"{now_s / then_s:.2f}",
        )
    slow_ms = f"{1e3 * p99_ttft([heavy]):.0f}"
    table.add_row(heavy.who, str(heavy.num_asked), str(heavy.num_served), "", slow_ms, "", "")
    return table


async def run_overload(folder: Path, seconds: float) -> None:
    async with paced(folder, **SHORT_QUEUE) as (cluster, url):
        await overload(url, cluster.keys[ORDINARY[0]], seconds)


async def run_shares(folder: Path, seconds: float, num_adapters: int) -> None:
    async with paced(folder, num_adapters=num_adapters, max_loaded_adapters=8) as (cluster, url):
        keys = cluster.keys
        per_s = await measure_capacity(url, keys[ORDINARY[0]], NUM_ROWS, seconds)
        for part in (16, 8):
            alone = await ordinary(url, keys, per_s / part, 2 * seconds, None)
            heavy = heavy_tenant(keys[HEAVY], list(cluster.setup.digests))
            beside = await ordinary(url, keys, per_s / part, 2 * seconds, heavy)
            console.print(shares(alone, beside, part))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    is_small = parser.parse_args().small
    seconds = 3.0 if is_small else 30.0
    console.print(describe())
    console.print(
        f"schedule, 256 running, 1000 wait for rows: {scheduling_cost(is_blocked=False):.2f} ms"
    )
    console.print(
        f"  ... for 500 adapters that do not come: {scheduling_cost(is_blocked=True):.2f} ms"
    )
    gap, bound = service_gap(2_000 if is_small else 50_000)
    console.print(f"gap of service between backlogged tenants: {gap:.0f} tokens, bound {bound:.0f}")
    simulate_first_tokens(10.0 if is_small else 200.0)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run_overload(Path(folder) / "overload", seconds))
        asyncio.run(run_shares(Path(folder) / "shares", seconds, 6 if is_small else 50))


if __name__ == "__main__":
    main()
