"""A burst at two workers that have just been killed and started again, through two gateways: what
is accepted has its first token in time, as much is accepted as later, and neither worker gets most
of it."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import pytest_asyncio

from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.open_loop import Ask, send
from tests.e2e.shares import ORDINARY, VOCAB
from tests.e2e.tiny import NAME
from tests.scale import IS_FULL
from tests.waiting import eventually
from workers.scheduling.terms import TERMS
from workers.wire.protocol import ServiceClass

NUM_STREAMS = 200
PROMPTS, ANSWER = range(600, 801), 64
"""Tokens."""
NUM_ROWS = 8
MAX_QUEUE_WAIT_S = 3.0
"""In which about half of the streams have room."""
LONGEST_S = MAX_QUEUE_WAIT_S * TERMS[ServiceClass.STANDARD].ttft_s
NUM_ROUNDS = 3
SERVED = re.compile(r"answered .* worker=(\S+) outcome=completed")

pytestmark = [
    pytest.mark.full,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_FULL, reason="measures times: make soak"),
]


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Two gateways and two workers on paced devices."""
    async with running_cluster(
        tmp_path,
        num_workers=2,
        num_gateways=2,
        num_adapters=0,
        tenants=ORDINARY[:1],
        worker="tests.e2e.paced_worker",
        max_num_seqs=NUM_ROWS,
        memory=256 << 20,
        max_queue_wait=MAX_QUEUE_WAIT_S,
    ) as cluster:
        yield cluster


@dataclass(frozen=True, slots=True)
class Burst:
    """What became of the streams. by_worker: how many each has answered. ttfts_s: seconds to the
    first token of these."""

    by_worker: Counter[str]
    num_refused: int
    ttfts_s: list[float]

    @property
    def num_late(self) -> int:
        return sum(each > LONGEST_S for each in self.ttfts_s)

    def __str__(self) -> str:
        p50, p95, p99, last = np.percentile(self.ttfts_s, [50, 95, 99, 100])
        return (
            f"{dict(sorted(self.by_worker.items()))}, {self.num_refused} refused, first tokens"
            f" p50 {p50:.2f} s, p95 {p95:.2f}, p99 {p99:.2f}, last {last:.2f},"
            f" {self.num_late} after {LONGEST_S:.0f} s"
        )


async def burst(cluster: Cluster, seed: int) -> Burst:
    """All streams at once, half of them through each gateway; no two prompts are alike."""
    rng = random.Random(seed)
    urls = [gateway.url for gateway in cluster.gateways.values()]
    before = num_served(cluster)
    prompts = [
        [rng.randrange(VOCAB) for _ in range(rng.choice(PROMPTS))] for _ in range(NUM_STREAMS)
    ]
    key = cluster.keys[ORDINARY[0]]
    outcomes = await asyncio.gather(
        *(
            send(urls[number % len(urls)], Ask("t", key, NAME, prompt, ANSWER))
            for number, prompt in enumerate(prompts)
        )
    )
    served = [each for each in outcomes if each.status == 200]
    assert all(each.is_whole and each.num_tokens == ANSWER for each in served)
    await eventually(lambda: (num_served(cluster) - before).total() == len(served))
    return Burst(
        num_served(cluster) - before,
        NUM_STREAMS - len(served),
        [each.ttft_s for each in served],
    )


def num_served(cluster: Cluster) -> Counter[str]:
    """Answers by the worker that gave them, as the gateways' logs have it."""
    logs = [gateway.log.read_text() for gateway in cluster.gateways.values() if gateway.log]
    return Counter(worker for log in logs for worker in SERVED.findall(log))


def num_connections(cluster: Cluster) -> int:
    """Of gateways to workers, ever."""
    logs = [gateway.log.read_text() for gateway in cluster.gateways.values() if gateway.log]
    return sum(log.count("connected to worker") for log in logs)


@pytest.mark.parametrize("round", range(NUM_ROUNDS))
async def test_of_a_burst_at_fresh_workers_what_is_accepted_is_in_time(
    cluster: Cluster, round: int
) -> None:
    num_before = num_connections(cluster)
    for worker in cluster.workers.values():
        await worker.kill()
    await asyncio.gather(*(worker.start() for worker in cluster.workers.values()))
    await eventually(lambda: num_connections(cluster) >= num_before + 4)
    first, *later = [await burst(cluster, 10 * round + number) for number in range(3)]
    for each in (first, *later):
        print(f"\n{each}", end="")
        assert each.num_late <= 0.05 * len(each.ttfts_s)
        assert max(each.by_worker.values()) <= 0.6 * each.by_worker.total()
    assert first.num_refused > 0
    for name in cluster.workers:
        assert first.by_worker[name] >= 0.8 * mean(each.by_worker[name] for each in later)
