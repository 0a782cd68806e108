"""Workers and gateways as processes that are killed, held up and replaced under their clients: an
answer goes on as if nothing had happened, or ends with an error; none just ends."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
import openai
import pytest
import pytest_asyncio

from tests.e2e.cluster import Answer, Asked, Cluster, running_cluster, stream
from tests.e2e.fleet import Worker
from tests.e2e.tiny import NAME
from tests.e2e.traffic import Told, Traffic
from tests.gateway.process import Options, gateway_process
from tests.plane import Plane
from tests.scale import IS_FULL, scaled
from tests.waiting import eventually

T = TypeVar("T")

SEED = 40
MODELS = (NAME, "a000", "a001")
ANSWER_TOKENS = 300
"""So long that a kill meets it half-way."""
WORDS = "([a-z]{3} ){500}"
"""What some of them are held to: longer than they may be."""
KILLED_AT = range(1, 51) if IS_FULL else (1, 20, 50)
"""Tokens that the client has when its worker is killed."""
NUM_WORKERS = scaled(2, 3)
NUM_STREAMS = scaled(12, 50)
HANG_S = scaled(4, 30)
WORKER_DRAIN_S = 120.0
GATEWAY_DRAIN_S = 30.0
EXIT_S = 2.0
"""After a second signal."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.chaos,
    pytest.mark.timeout(scaled(300, 1800)),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    async with running_cluster(folder, num_workers=NUM_WORKERS, num_gateways=2) as cluster:
        yield cluster


@pytest.fixture
def rng() -> random.Random:
    return random.Random(SEED)


def long_answers(rng: random.Random, count: int) -> list[Asked]:
    """All kinds of them: greedy and sampled, with an adapter and without."""
    kinds = itertools.cycle(itertools.product(MODELS[:2], (0.0, 1.0)))
    return [
        Asked(
            prompt=tuple(rng.randrange(256) for _ in range(40)),
            max_tokens=ANSWER_TOKENS,
            model=model,
            temperature=temperature,
            seed=rng.randrange(1 << 31),
        )
        for model, temperature in itertools.islice(kinds, count)
    ]


async def test_a_stream_goes_on_when_its_worker_is_killed(
    cluster: Cluster, rng: random.Random
) -> None:
    async def kill(answer: Answer) -> None:
        await cluster.workers[answer.worker].kill()

    num_moves = cluster.num_moves
    greedy, sampled, *others = long_answers(rng, 4)
    asked = [*others, *(replace(each, regex=WORDS) for each in (greedy, sampled))]
    undisturbed = await asyncio.gather(*(cluster.ask("gateway-0", each) for each in asked))
    for answer in undisturbed[len(others) :]:
        assert re.fullmatch("([a-z]{3} )*[a-z]{0,3}", answer.text)
    for number, killed in zip(KILLED_AT, itertools.cycle(reversed(asked))):
        killing = Once(number, kill)
        disturbed = await asyncio.gather(
            *(
                cluster.ask(
                    "gateway-0",
                    each,
                    salt=str(number),
                    on_token=killing if each is killed else lambda _: None,
                )
                for each in asked
            )
        )
        for answer, wanted in zip(disturbed, undisturbed, strict=True):
            assert len(wanted.tokens) == ANSWER_TOKENS and wanted.finish_reason == "length"
            assert answer.says(wanted), f"killed at {number}: {answer} is not {wanted}"
        await killing
        await start_all(cluster)
    num_moves = cluster.num_moves - num_moves
    print(f"\n{len(KILLED_AT)} workers killed, {num_moves} sequences went elsewhere")
    assert num_moves > 0


async def test_without_another_worker_the_client_hears_of_it(
    cluster: Cluster, rng: random.Random, tmp_path: Path
) -> None:
    worker = cluster.workers["worker-0"]
    lonely = gateway_process(
        Options(
            dsn=cluster.dsn,
            store=str(cluster.setup.folder / "store" / "models"),
            wal=str(tmp_path / "spool"),
            worker=worker.address,
            failover_wait_s=0.5,
        )
    )
    (asked,) = long_answers(rng, 1)
    undisturbed = await cluster.ask("gateway-0", asked)
    told: list[Answer] = []

    async def kill(answer: Answer) -> None:
        told.append(answer)
        await worker.kill()

    killing = Once(5, kill)
    try:
        await lonely.start()
        client = openai.AsyncOpenAI(base_url=f"{lonely.url}/v1", api_key=cluster.keys["acme"])
        async with client:
            with pytest.raises(openai.APIError) as failure:
                await stream(client, asked, on_token=killing)
            assert failure.value.code == "worker_lost"
    finally:
        await lonely.kill()
    (answer,) = told
    assert answer.finish_reason is None and answer.tokens
    assert undisturbed.tokens[: len(answer.tokens)] == answer.tokens
    await killing
    await start_all(cluster)


async def test_what_a_killed_worker_had_not_begun_is_answered_elsewhere(
    cluster: Cluster, rng: random.Random
) -> None:
    num_kills, num_requests = scaled(1, 6), scaled(40, 300)
    asked = [Asked.draw(rng, MODELS, 480, 1) for _ in range(24)]
    num_moves = cluster.num_moves
    async with Traffic.of(cluster, asked, 36) as traffic:
        for _ in range(num_kills):
            await start_all(cluster)
            await traffic.answers(num_requests)
            worker = rng.choice(list(cluster.workers.values()))
            # What comes to it now waits there.
            worker.pause()
            await asyncio.sleep(0.5)
            await worker.kill()
            await traffic.answers(num_requests)
    await start_all(cluster)
    num_moves = cluster.num_moves - num_moves
    num_asked = len(traffic.told) + len(traffic.failures)
    print(
        f"\n{num_asked} requests, {num_kills} kills, {num_moves} sent again, "
        f"{len(traffic.failures)} failed"
    )
    assert num_moves > num_kills, "hardly a kill met a request that waited"
    assert len(traffic.failures) <= 0.001 * num_asked, traffic.failures[:5]
    # A quiet gateway has a few retries in any case.
    assert num_moves <= max(0.1 * num_asked, 0 if IS_FULL else 64)


async def test_a_worker_that_hangs_is_left_and_taken_back(
    cluster: Cluster, rng: random.Random
) -> None:
    """More clients than rows: some of what it has is begun, some waits."""
    hung = cluster.workers["worker-1"]
    asked = [Asked.draw(rng, MODELS, 40, 40) for _ in range(24)]
    async with Traffic.of(cluster, asked, 36) as traffic:
        await traffic.answers(100)
        hung.pause()
        paused_at, paused = time.monotonic(), time.time()

        def ejected_after() -> list[float]:
            """Seconds, by gateway; negative: not yet."""
            return [said_at(each, "is silent") - paused for each in cluster.gateways.values()]

        await eventually(lambda: min(ejected_after()) > 0, 30.0)
        await asyncio.sleep(max(paused_at + HANG_S - time.monotonic(), 0.0))
        hung.resume()
        resumed_at = time.monotonic()

        def back() -> list[Told]:
            return [t for t in traffic.told if t.worker == hung.name and t.asked_at > resumed_at]

        await eventually(back, 5.0 if IS_FULL else 50.0)
    assert not traffic.failures, traffic.failures[:5]
    ejected_s = max(ejected_after())
    during = [t for t in traffic.told if paused_at - 1 < t.asked_at < resumed_at]
    there, elsewhere = (
        max((t.longest_wait_s for t in during if (t.worker == hung.name) is was_there), default=0)
        for was_there in (True, False)
    )
    back_s = min(told.first_at for told in back()) - resumed_at
    print(
        f"\nejected after {ejected_s:.2f} s, back after {back_s:.2f} s; of {len(during)} requests "
        f"meanwhile those there waited for {there:.2f} s at most, others for {elsewhere:.2f} s"
    )
    for told in during:
        is_after = told.asked_at > paused_at + ejected_s and told.first_at < resumed_at
        assert not (is_after and told.worker == hung.name)
    if IS_FULL:
        assert ejected_s <= 3.0
        assert there <= 3.0 + elsewhere
        assert back_s <= 5.0


def said_at(process: Plane, words: str) -> float:
    """When its log has them last, in seconds since 1970; 0: never."""
    assert process.log is not None
    lines = [line for line in process.log.read_text().splitlines() if words in line]
    last = lines[-1][:23] if lines else "1970-01-01 00:00:00,0"
    return datetime.strptime(last, "%Y-%m-%d %H:%M:%S,%f").timestamp()


async def test_all_are_replaced_one_after_the_other(cluster: Cluster, rng: random.Random) -> None:
    """As an operator does it: a process ends, starts, is ready; then the next."""
    asked = [Asked.draw(rng, MODELS, 40, rng.randrange(100, 300)) for _ in range(12)]
    replaced = [*list(cluster.workers)[: scaled(1, 3)], *cluster.gateways]
    took_s: dict[str, float] = {}
    # Short of cores, processes would start for ever.
    async with Traffic.of(cluster, asked, NUM_STREAMS, pause_s=scaled(1, 0)) as traffic:
        for name in replaced:
            process = cluster.processes[name]
            await traffic.answers(NUM_STREAMS)
            began_at = time.monotonic()
            assert await process.end() == 0
            took_s[name] = time.monotonic() - began_at
            await process.start()
        await traffic.answers(NUM_STREAMS)
    assert not traffic.failures, traffic.failures[:5]
    for name, seconds in took_s.items() if IS_FULL else ():
        assert seconds <= (WORKER_DRAIN_S if name in cluster.workers else GATEWAY_DRAIN_S), name
    ends = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in took_s.items())
    print(
        f"\n{len(traffic.told)} answers through {NUM_STREAMS} streams; ended within {ends}; "
        f"connections: {traffic.num_refused} refused, {traffic.num_cut} not answered"
    )
    # In the short form a gateway is back before every client has asked it.
    assert traffic.num_refused > 0 or not IS_FULL, "no client met a gateway that was away"


@pytest.mark.skipif(not IS_FULL, reason="scripted workers have it in the suite")
async def test_a_request_whose_workers_die_one_after_the_other_is_refused(
    cluster: Cluster, rng: random.Random
) -> None:
    """What it does to them cannot be had of real ones, so the test kills whoever has it. The third
    never gets it."""
    prompts = [[rng.randrange(256) for _ in range(480)] for _ in range(96)]
    client = cluster.client("gateway-0")
    for _ in range(20):
        # Of so many sequences a tenth may be tried again: each of the prompts twice.
        await client.completions.create(model=NAME, prompt=[[1]] * 100, max_tokens=1)
    idle = {each: await last_step(each) for each in cluster.workers.values()}

    async def first_to_work() -> Worker:
        while True:
            for worker, step in idle.items():
                if await last_step(worker) > step:
                    return worker

    answer = asyncio.create_task(
        client.completions.create(model=NAME, prompt=prompts, max_tokens=1)
    )
    for _ in range(2):
        worker = await first_to_work()
        del idle[worker]
        await worker.kill()
    with pytest.raises(openai.InternalServerError) as failure:
        await answer
    assert failure.value.code == "poison_request"
    assert failure.value.response.headers["x-should-retry"] == "false"
    (asked,) = long_answers(rng, 1)
    assert (await cluster.ask("gateway-0", asked)).worker in {each.name for each in idle}
    await start_all(cluster)


async def last_step(worker: Worker) -> int:
    """The number of the last step that it has computed."""
    transport = httpx.AsyncHTTPTransport(uds=worker.health.removeprefix("unix:"))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        return max((await client.get("/steps")).json()["step"], default=-1)


async def test_a_second_signal_ends_a_process_at_once(cluster: Cluster, rng: random.Random) -> None:
    """A worker's answers go on elsewhere; a gateway's break off, and are seen to."""
    asked = long_answers(rng, 4)
    undisturbed = await asyncio.gather(*(cluster.ask("gateway-0", each) for each in asked))
    gateway = cluster.gateways["gateway-1"]
    end_worker = Once(5, lambda answer: end_twice(cluster.workers[answer.worker]))
    end_gateway = Once(5, lambda _: end_twice(gateway))

    async def ask(act: Once[float]) -> list[Answer | BaseException]:
        first, *others = asked
        return await asyncio.gather(
            cluster.ask(gateway.name, first, salt="1", on_token=act),
            *(cluster.ask(gateway.name, each, salt="1") for each in others),
            return_exceptions=True,
        )

    for answer, wanted in zip(await ask(end_worker), undisturbed, strict=True):
        assert isinstance(answer, Answer) and answer.says(wanted), answer
    for answer, wanted in zip(await ask(end_gateway), undisturbed, strict=True):
        assert isinstance(answer, BaseException) or answer.says(wanted), answer
    took_s = [await end_worker, await end_gateway]
    print(f"\nended {', '.join(f'{seconds:.2f} s' for seconds in took_s)} after the second signal")
    assert not IS_FULL or max(took_s) <= EXIT_S


async def end_twice(process: Plane) -> float:
    """Seconds from the second signal to its end."""
    process.send(signal.SIGTERM)
    await asyncio.sleep(0.1)
    assert process.is_running, "it had nothing to finish"
    began_at = time.monotonic()
    # By the signal itself where the process has just given its handlers back.
    assert await process.end() in (1, -signal.SIGTERM)
    return time.monotonic() - began_at


class Once(Generic[T]):
    """An `on_token` that begins something when so many tokens have come; await its `task` then."""

    def __init__(self, number: int, act: Callable[[Answer], Coroutine[Any, Any, T]]) -> None:
        self.task: asyncio.Task[T] | None = None
        self._number = number
        self._act = act

    def __call__(self, answer: Answer) -> None:
        if len(answer.tokens) >= self._number and self.task is None:
            self.task = asyncio.create_task(self._act(answer))

    def __await__(self) -> Generator[Any, Any, T]:
        assert self.task is not None, "so many tokens have not come"
        return self.task.__await__()


async def start_all(cluster: Cluster) -> None:
    ended = [each for each in cluster.processes.values() if not each.is_running]
    await asyncio.gather(*(each.start() for each in ended))
