"""What the whole product does with more than it can do: goodput and refusals of an open loop, and
ordinary tenants beside one that asks for ten times as much."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.open_loop import Ask, Outcome, open_loop, p99, send, send_until_served
from tests.e2e.tiny import NAME

VOCAB = 256
NUM_PROMPT = 32
NUM_OUTPUT = range(16, 81)
"""If all answers were as long, rows would come free all at once, and then none for long."""
GIANT = 1000
NUM_ROWS = 32
FEW_ROWS = 8
SHORT_QUEUE = {"max_num_seqs": FEW_ROWS, "max_queue_wait": 0.02}
"""Settings of a worker in whose queue nobody waits much longer than some do at any load."""
ORDINARY, HEAVY = ("one", "two", "three"), "heavy"


@dataclass(frozen=True, slots=True)
class Load:
    """What came of an open loop at so many times the capacity."""

    times: float
    served_per_s: float
    p99_ttft_s: float
    num_refused: int
    p50_refusal_s: float
    p99_refusal_s: float
    all_told_when: bool
    all_whole: bool


@asynccontextmanager
async def paced(
    folder: Path, num_workers: int = 1, num_adapters: int = 0, **settings: Any
) -> AsyncIterator[tuple[Cluster, str]]:
    """Workers whose devices take nothing from the gateway that is measured, and its URL; all
    tenants of this module. settings: of the workers."""
    async with running_cluster(
        folder,
        num_workers=num_workers,
        num_gateways=1,
        num_adapters=num_adapters,
        tenants=(*ORDINARY, HEAVY),
        worker="tests.e2e.paced_worker",
        **{"max_num_seqs": NUM_ROWS, "memory": 64 << 20, **settings},
    ) as cluster:
        yield cluster, cluster.gateways["gateway-0"].url


def make(rng: random.Random, who: str, key: str) -> Callable[[], Ask]:
    """An ordinary request; no two prompts are alike."""

    def ask() -> Ask:
        prompt = [rng.randrange(VOCAB) for _ in range(NUM_PROMPT)]
        return Ask(who, key, NAME, prompt, rng.choice(NUM_OUTPUT))

    return ask


async def capacity(url: str, ask: Callable[[], Ask], num_clients: int, seconds: float) -> float:
    """Returns the requests a second of a closed loop, after its first second; of none, 0."""
    loop = asyncio.get_running_loop()
    counts: list[float] = []
    end = loop.time() + seconds + 1.0

    async def client() -> None:
        while loop.time() < end:
            outcome = await send(url, ask())
            if outcome.status == 200:
                counts.append(loop.time())
            else:
                await asyncio.sleep(0.05)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return sum(end - seconds <= at < end for at in counts) / seconds if seconds else 0.0


async def measure_capacity(url: str, key: str, num_rows: int, seconds: float) -> float:
    """Of one worker: half as many clients again as it has rows."""
    ask = make(random.Random(0), "warm", key)
    return await capacity(url, ask, num_rows + num_rows // 2, seconds)


async def load(url: str, key: str, times: float, per_s: float, seconds: float) -> Load:
    rng = random.Random(int(times * 10))
    outcomes = await open_loop(url, [(times * per_s, make(rng, "t", key))], seconds, seed=1)
    return _load(times, outcomes, seconds)


async def at_once(url: str, key: str, count: int) -> Load:
    """Returns what became of so many requests that were sent together."""
    ask = make(random.Random(4), "t", key)
    outcomes = await asyncio.gather(*(send(url, ask()) for _ in range(count)))
    return _load(0.0, outcomes, max(o.end_s for o in outcomes) - outcomes[0].sent_s)


def _load(times: float, outcomes: Sequence[Outcome], seconds: float) -> Load:
    served = [o for o in outcomes if o.status == 200]
    refused = [o for o in outcomes if o.status != 200]
    begin = min(o.sent_s for o in outcomes)
    in_time = [o for o in served if o.end_s <= begin + seconds]
    return Load(
        times,
        len(in_time) / seconds,
        p99([o.ttft_s for o in served]),
        len(refused),
        median(o.seconds for o in refused) if refused else 0.0,
        p99([o.seconds for o in refused]) if refused else 0.0,
        all(o.status in (429, 503) and int(o.headers["retry-after"]) >= 1 for o in refused),
        all(o.is_whole and o.num_tokens > 0 for o in served),
    )


async def obedient(url: str, key: str, count: int) -> list[list[Outcome]]:
    """So many clients at once, each of which comes again when it is told to."""
    ask = make(random.Random(3), "t", key)
    return await asyncio.gather(*(send_until_served(url, ask()) for _ in range(count)))


@dataclass(frozen=True, slots=True)
class Beside:
    """A tenant: how often it asked, and what it got."""

    who: str
    num_asked: int
    statuses: frozenset[int]
    ttfts_s: tuple[float, ...]
    """Of whole answers."""

    @property
    def num_served(self) -> int:
        return len(self.ttfts_s)


def p99_ttft(tenants: Sequence[Beside]) -> float:
    """Seconds, over the answers of them all."""
    return p99([seconds for tenant in tenants for seconds in tenant.ttfts_s])


async def ordinary(
    url: str, keys: dict[str, str], per_s: float, seconds: float, heavy: Callable[[], Ask] | None
) -> list[Beside]:
    """Each ordinary tenant asks `per_s` times a second, and a heavy one, if any, ten times as
    often: it comes last."""
    streams = [(per_s, make(random.Random(who), who, keys[who])) for who in ORDINARY]
    if heavy is not None:
        streams.append((10 * per_s, heavy))
    outcomes = await open_loop(url, streams, seconds, seed=2)
    found: list[Beside] = []
    for who in (*ORDINARY, HEAVY) if heavy else ORDINARY:
        own = [o for o in outcomes if o.who == who]
        served = [o for o in own if o.status == 200 and o.is_whole]
        statuses = frozenset(o.status for o in own)
        found.append(Beside(who, len(own), statuses, tuple(o.ttft_s for o in served)))
    return found


def heavy_tenant(key: str, models: list[str]) -> Callable[[], Ask]:
    """Every fourth prompt is a giant; the adapters change from one request to the next."""
    rng = random.Random(9)

    def ask() -> Ask:
        length = GIANT if rng.random() < 0.25 else NUM_PROMPT
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        return Ask(HEAVY, key, rng.choice(models), prompt, rng.choice(NUM_OUTPUT))

    return ask
