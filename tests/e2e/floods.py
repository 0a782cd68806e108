"""Floods of refused requests against the whole product: what another tenant notices of one, and how
many prompts finish beside clients that ask again at once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from admin.quotas import quotas
from admin.quotas.quotas import QuotaDetails
from tests.e2e.attack_client import Answers, Attack, AttackClient, Order, attacking
from tests.e2e.cluster import Cluster
from tests.e2e.open_loop import open_loop, p99
from tests.e2e.shares import ORDINARY, VOCAB, make, paced
from tests.e2e.tiny import NAME

PROMPT = 4000
"""Tokens of a prompt that takes the paced device a third of a second."""
NUM_CLIENTS = 32
QUEUE: dict[str, Any] = {"max_model_len": 8192, "max_queue_wait": 0.5}
"""In which a third of the clients' prompts have room."""
PER_S = 4.0
"""Requests a second of the other tenant: a tenth of what the device can do."""
LARGE_PROMPTS, LARGE_PROMPT = 128, 2000
"""Of a request of 1 MB, with a thousand times as many tokens as an ordinary one."""
NO_TOKEN = 1 << 20
"""An id that the model does not have."""
LONGEST_S = 60.0
"""For one prompt to finish beside all others."""


@asynccontextmanager
async def flooded(folder: Path) -> AsyncIterator[Cluster]:
    """One gateway and one worker on a paced device."""
    async with paced(folder, **QUEUE) as (cluster, _):
        yield cluster


async def limit(cluster: Cluster, tenant: str, **limits: Any) -> None:
    """Returns when the gateway refuses by them, or after a second if there are none."""
    async with cluster.database.transaction() as connection:
        row = await connection.fetchrow("SELECT id FROM tenants WHERE name = $1", tenant)
        assert row is not None
        quota = QuotaDetails(row["id"], **limits)
        await quotas.set_quota(connection, row["id"], None, quota)
    await asyncio.sleep(1.0)


def large_request(rng: random.Random, last_token: int = 0) -> bytes:
    """last_token: of its last prompt. One that the model does not have is found last of all."""
    prompts = [[rng.randrange(VOCAB)] * LARGE_PROMPT for _ in range(LARGE_PROMPTS)]
    prompts[-1][-1] = last_token
    return msgspec.json.encode({"model": NAME, "prompt": prompts, "max_tokens": 1})


def long_prompts(rng: random.Random) -> Iterator[bytes]:
    """Requests with prompts of which no two are alike."""
    while True:
        prompt = [rng.randrange(VOCAB) for _ in range(PROMPT)]
        yield msgspec.json.encode({"model": NAME, "prompt": prompt, "max_tokens": 1})


def flood_order(url: str, key: str, body: bytes = b"") -> Order:
    return Order(url, key, Attack("flood", "/v1/completions", body, num_connections=100))


@asynccontextmanager
async def flooding(url: str, key: str, body: bytes) -> AsyncIterator[Answers]:
    """Sends the request again and again from a process of its own. The answers are there at the
    end."""
    async with attacking(flood_order(url, key, body)) as (answers, _):
        yield answers


@dataclass(frozen=True, slots=True)
class Noticed:
    """What another tenant's requests took, in seconds."""

    num_served: int
    num_asked: int
    p50_ttft_s: float
    p99_ttft_s: float
    p50_gap_s: float
    p99_gap_s: float


async def other_tenant(url: str, key: str, seconds: float) -> Noticed:
    who = ORDINARY[0]
    outcomes = await open_loop(url, [(PER_S, make(random.Random(who), who, key))], seconds, seed=3)
    served = [each for each in outcomes if each.status == 200 and each.is_whole]
    gaps = sorted(gap for each in served for gap in each.gaps_s)
    ttfts = sorted(each.ttft_s for each in served)
    return Noticed(
        len(served),
        len(outcomes),
        *(ttfts[len(ttfts) // 2], p99(ttfts)),
        *(gaps[len(gaps) // 2], p99(gaps)),
    )


async def finished_per_s(
    url: str, key: str, seconds: float, *, is_patient: bool
) -> tuple[float, Answers]:
    """Prompts that clients finish in a second. They wait before they ask again as their refusals
    say, or not at all."""
    answers = Answers()
    order = flood_order(url, key)
    clients = [AttackClient(order, answers) for _ in range(NUM_CLIENTS)]
    num_finished = 0

    async def run(client: AttackClient, number: int) -> None:
        nonlocal num_finished
        bodies = long_prompts(random.Random(number + 100 * is_patient))
        body = next(bodies)
        while True:
            status, wait_s = await client.ask(body)
            if status == 200:
                num_finished += 1
                body = next(bodies)
            elif is_patient:
                await asyncio.sleep(wait_s)

    tasks = [asyncio.create_task(run(client, n)) for n, client in enumerate(clients)]
    await asyncio.sleep(min(5.0, seconds / 2))
    begin_s, num_before = time.perf_counter(), num_finished
    await asyncio.sleep(seconds)
    # A machine that is slow just then may have finished none in that time.
    while num_finished == num_before and time.perf_counter() < begin_s + seconds + LONGEST_S:
        await asyncio.sleep(0.05)
    per_s = (num_finished - num_before) / (time.perf_counter() - begin_s)
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
    for client in clients:
        client.close()
    return per_s, answers
