"""`python -m benchmarks.attacks`: measures what a tenant notices of attacks on the gateway's memory
and event loop.

Each round measures the first tokens of a tenant, first alone and then beside each attack, whose
client is held to a tenth of a core. The table has the medians of all rounds: the p99 of the first
token, its ratio to the one alone in the same round, the cores that the parts of the installation
used, and the gateway's highest resident size, which must stay below 1 GiB. Gateway, Postgres and
worker are separate processes, and the worker serves a tiny model with the step times of a large GPU
(tests/e2e/paced_worker.py). With `--sections`, the gateway runs on Python's own event loop and the
longest sections of the loop are printed for each attack. Their times show whether the gateway's
loop is the cause, but the first tokens are then slower. `--small` only checks that everything runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from tests.e2e.attack_client import Attack
from tests.e2e.cluster import Cluster
from tests.e2e.floods import Noticed, other_tenant
from tests.e2e.measured_gateway import SECTIONS_FILE, read_sections
from tests.e2e.memory_attacks import GATEWAY_BYTES, Usage, attacked, attacks, slowly_attacking
from tests.e2e.shares import ORDINARY

ALONE = "nothing"
MOST = 1.5
"""Highest ratio of the first tokens' p99 that is allowed."""
NUM_SECTIONS = 3
PARTS = ("gateway", "postgres", "worker", "machine")

console = Console(width=180)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurement beside an attack, or alone."""

    noticed: Noticed
    ratio: float
    cores: dict[str, float]
    peak_bytes: int


async def measure(cluster: Cluster, seconds: float, alone: Measured | None) -> Measured:
    """Measures the ordinary tenant. `alone` is the measurement without an attack, if any."""
    gateway = cluster.gateways["gateway-0"]
    (worker,) = cluster.workers.values()
    usage = Usage(gateway.pid, worker.pid)
    noticed = await other_tenant(gateway.url, cluster.keys[ORDINARY[0]], seconds)
    ratio = 1.0 if alone is None else noticed.p99_ttft_s / alone.noticed.p99_ttft_s
    return Measured(noticed, ratio, usage.shares(), usage.peak_bytes)


async def one_round(
    cluster: Cluster, chosen: list[Attack], seconds: float, sections: Path | None
) -> dict[str, Measured]:
    alone = await measure(cluster, seconds, None)
    found = {ALONE: alone}
    for attack in chosen:
        if sections is not None:
            sections.unlink(missing_ok=True)
        async with slowly_attacking(cluster, attack) as answers:
            found[attack.name] = await measure(cluster, seconds, alone)
        console.print(f"{attack.name}: {answers.statuses}, {found[attack.name].ratio:.2f} times")
        for section in read_sections(sections)[:NUM_SECTIONS] if sections else ():
            console.print(f"  {section.cpu_s * 1e3:.0f} ms {section.stack}")
    return found


def show(rounds: list[dict[str, Measured]]) -> None:
    of: dict[str, list[Measured]] = defaultdict(list)
    for each in rounds:
        for name, measured in each.items():
            of[name].append(measured)
    table = Table(
        *("beside", "served", "first token p50", "p99, in ms", "times alone"),
        *(f"cores: {part}" for part in PARTS),
        "peak, MiB",
    )
    for name, all_of in of.items():
        served = sum(each.noticed.num_served for each in all_of)
        asked = sum(each.noticed.num_asked for each in all_of)
        table.add_row(
            *(name, f"{served} of {asked}"),
            f"{median(each.noticed.p50_ttft_s for each in all_of) * 1e3:.1f}",
            f"{median(each.noticed.p99_ttft_s for each in all_of) * 1e3:.1f}",
            f"{median(each.ratio for each in all_of):.2f}",
            *(f"{median(each.cores[part] for each in all_of):.2f}" for part in PARTS),
            f"{max(each.peak_bytes for each in all_of) / (1 << 20):.0f}",
        )
    console.print(table)
    for name, all_of in of.items():
        if (ratio := median(each.ratio for each in all_of)) > MOST:
            console.print(f"{name}: {ratio:.2f} times is more than {MOST}")
        if max(each.peak_bytes for each in all_of) >= GATEWAY_BYTES:
            console.print(f"{name}: the gateway took more than 1 GiB")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--only", help="a part of the names of the attacks", default="")
    parser.add_argument("--sections", action="store_true")
    given = parser.parse_args()
    num_rounds, seconds = (1, 3.0) if given.small else (given.rounds, given.seconds)
    chosen = [attack for attack in attacks() if given.only in attack.name]
    console.print(describe())
    with tempfile.TemporaryDirectory() as folder:
        sections = Path(folder) / "sections" if given.sections else None
        options = {}
        if sections is not None:
            os.environ[SECTIONS_FILE] = str(sections)
            options = {"gateway": "tests.e2e.measured_gateway"}
        async with attacked(Path(folder) / "cluster", **options) as cluster:
            rounds = [
                await one_round(cluster, chosen, seconds, sections) for _ in range(num_rounds)
            ]
    show(rounds)


if __name__ == "__main__":
    asyncio.run(main())
