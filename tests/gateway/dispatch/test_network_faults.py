"""The network between a gateway and its workers delays, swallows, trickles, resets and half-closes.

No request outlives its deadline, none is truncated or garbled, and what was told is in the ledger.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from adapters.reference import AdapterRef
from tests.adapters.files import BASE
from tests.gateway.live import GatewayPlane, Live
from tests.outcome import End, Outcome, complete
from tests.proxy import FAULTS, TOWARDS, Proxy, Toward, Way
from tests.scale import IS_FULL, scaled
from tests.scripted_worker import Reply, ScriptedWorker
from tests.waiting import eventually
from workers.wire.client import WorkerClient, WorkerFailed
from workers.wire.protocol import Generate
from workers.wire.transport.base import Security

pytestmark = pytest.mark.full

SEED = 41
NUM_CLIENTS = 4
STEP_S = 0.02
FAULT_S = scaled(4, 30)
"""Longer than a worker may be silent."""
STORM_S = 300
FIRST_TOKEN_S = 3.0
"""The deadline of each request in the storm."""
LIMIT_S = 120.0
"""Ten times what it may take until a request that has begun is resumed: a connection that stays
silent is given up after ten seconds."""
OFF = 1 << 40
INSECURE = Security(insecure=True)
CASES: list[tuple[str, Toward]] = [(kind, toward) for kind in FAULTS for toward in TOWARDS]


def scripted(request: Generate) -> Reply:
    """What is left of the answer; the whole depends on the seed and the choice alone."""
    return Reply(expected(request.params.seed, request.params.choice)[request.num_resumed :])


def expected(seed: int, choice: int) -> list[int]:
    chance = random.Random(f"{seed} {choice}")
    return [chance.randrange(256) for _ in range(chance.randrange(1, 40))]


class Site:
    """A gateway and two workers, each behind a proxy."""

    def __init__(
        self, plane: GatewayPlane, key: str, workers: list[ScriptedWorker], proxies: list[Proxy]
    ) -> None:
        self.workers = workers
        self.proxies = proxies
        self.outcomes: list[Outcome] = []
        self._plane = plane
        self._key = key
        self._is_over = False

    @asynccontextmanager
    async def traffic(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Clients that ask one request after the other; each has ended at the end."""
        clients = [
            asyncio.create_task(self._ask_on(random.Random(SEED + i), timeout_s))
            for i in range(NUM_CLIENTS)
        ]
        try:
            yield
        finally:
            self._is_over = True
            await asyncio.gather(*clients)

    async def _ask_on(self, chance: random.Random, timeout_s: float | None) -> None:
        while not self._is_over:
            outcome = await self.ask(
                timeout_s,
                seed=chance.randrange(OFF),
                stream=chance.random() < 0.7,
                n=chance.choice([1, 1, 2]),
            )
            if outcome.end is not End.FINISHED:
                await asyncio.sleep(0.05)

    async def ask(self, timeout_s: float | None = None, seed: int = 1, **fields: Any) -> Outcome:
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 40, "seed": seed, **fields}
        outcome = await complete(
            self._plane.client, body, key=self._key, limit_s=LIMIT_S, timeout_s=timeout_s
        )
        self.outcomes.append(outcome)
        wanted = {choice: expected(seed, choice) for choice in range(fields.get("n", 1))}
        for choice, tokens in outcome.tokens.items():
            assert tokens == wanted[choice][: len(tokens)]
        if outcome.end is End.FINISHED:
            assert outcome.tokens == wanted
            assert outcome.usage == (2, sum(map(len, wanted.values())))
        return outcome

    @property
    def told(self) -> dict[str, tuple[int, int] | None]:
        """Usage of the answers whose end was seen, by request."""
        return {o.request_id: o.usage for o in self.outcomes if o.end is End.FINISHED}

    def assert_as_asked(self, *failures: str) -> Counter[str]:
        """Each was answered, or failed by one of these names."""
        ends = Counter(o.code or o.end for o in self.outcomes)
        assert not ends.keys() - {End.FINISHED, *failures}, ends
        assert ends[End.FINISHED] > NUM_CLIENTS, ends
        return ends

    async def is_well(self) -> None:
        """Returns when both workers answer again, and nothing is held for what has ended."""
        gateway = self._plane.gateway

        async def answers(client: WorkerClient) -> bool:
            try:
                return bool(await client.probe(BASE.digest, AdapterRef("a" * 64)))
            except WorkerFailed:
                return False

        for client in gateway.fleet.clients:
            await eventually(partial(answers, client), LIMIT_S)
        await eventually(lambda: not any(worker.num_running for worker in self.workers))
        await eventually(lambda: not any(client.num_open for client in gateway.fleet.clients))
        assert gateway.admission.num_open == 0 and not gateway.in_flight_requests.by_version


@asynccontextmanager
async def site(live: Live, name: str) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        workers: list[ScriptedWorker] = []
        proxies: list[Proxy] = []
        for number in range(2):
            address = f"unix:{live.folder / name}-{number}"
            worker = ScriptedWorker(address, [BASE.digest], scripted, STEP_S)
            worker.instance_id = f"{name}-{number}"
            workers.append(await stack.enter_async_context(worker))
            proxy = Proxy("tcp://127.0.0.1:0", address)
            proxies.append(await stack.enter_async_context(proxy))
        plane = await stack.enter_async_context(
            live.gateway(name, workers=[proxy.address for proxy in proxies], security=INSECURE)
        )
        clients = plane.gateway.fleet.clients
        await eventually(lambda: all(client.is_ready for client in clients))
        place = Site(plane, live.key, workers, proxies)
        yield place
        await place.is_well()


async def one_fault(live: Live, kind: str, toward: Toward) -> Site:
    """At one of two workers, for a while: nobody notices."""
    async with site(live, f"{kind}-{toward}") as place:
        proxy = place.proxies[0]
        async with place.traffic():
            await asyncio.sleep(0.5)
            # More often, and the retries of requests without a token would end with their budget.
            for _ in range(FAULT_S):
                FAULTS[kind](proxy, toward)
                await asyncio.sleep(1)
            proxy.set_both(Way())
            await asyncio.sleep(0.5)
        try:
            place.assert_as_asked()
        except AssertionError as error:
            error.add_note(f"{kind} toward the {toward}")
            raise
    return place


async def assert_ledger(live: Live, sites: list[Site]) -> None:
    """What was told is there once, with the tokens that were told, and nothing is there twice."""
    rows = await live.fetch("SELECT request_id, prompt_tokens, completion_tokens FROM usage")
    ledger = {r["request_id"]: (r["prompt_tokens"], r["completion_tokens"]) for r in rows}
    assert len(rows) == len(ledger)
    told = {request: usage for site in sites for request, usage in site.told.items()}
    assert {request: ledger.get(request) for request in told} == told


async def test_a_fault_between_a_gateway_and_one_of_two_workers_costs_no_request(
    live: Live,
) -> None:
    """Each kind in each direction, at places of their own at the same time."""
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(one_fault(live, kind, toward)) for kind, toward in CASES]
    await assert_ledger(live, [task.result() for task in asked])


@pytest.mark.chaos
@pytest.mark.skipif(not IS_FULL, reason="a load of fixed length: make chaos")
@pytest.mark.timeout(900)
async def test_any_faults_anywhere(live: Live) -> None:
    """Both workers at once: a request may fail, by name and within its deadline."""
    print(f"seed {SEED}")
    async with site(live, "storm") as place:
        async with place.traffic(timeout_s=FIRST_TOKEN_S), asyncio.timeout(STORM_S + LIMIT_S):
            await asyncio.gather(
                *(storm(proxy, random.Random(SEED + i)) for i, proxy in enumerate(place.proxies))
            )
        ends = place.assert_as_asked("worker_lost", "no_worker", "deadline_exceeded")
        slowest_s = max(outcome.head_s or 0.0 for outcome in place.outcomes)
        assert slowest_s < 10 * FIRST_TOKEN_S
        print(f"{dict(ends)}, the last head after {slowest_s:.1f} s")
    await assert_ledger(live, [place])


async def test_who_was_cut_off_from_two_workers_did_not_kill_them(live: Live) -> None:
    """Without a token in between. They are reached again soon, and it goes on."""

    def slow(request: Generate) -> Reply:
        return dataclasses.replace(scripted(request), idle_steps=50)

    async with site(live, "cut") as place:
        for worker in place.workers:
            worker.script = slow
        asking = asyncio.create_task(place.ask())
        await eventually(lambda: any(worker.requests for worker in place.workers))
        first, second = sorted((0, 1), key=lambda i: not place.workers[i].requests)
        async with place.proxies[first].closed():
            await eventually(lambda: place.workers[second].requests)
            async with place.proxies[second].closed():
                await asyncio.sleep(0.1)
        assert (await asking).end is End.FINISHED


async def storm(proxy: Proxy, chance: random.Random) -> None:
    """Each fault once, again and again in another order."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + STORM_S
    cases: list[tuple[str, Toward]] = []
    while loop.time() < ends_at:
        cases = cases or chance.sample(CASES, len(CASES))
        kind, toward = cases.pop()
        FAULTS[kind](proxy, toward)
        await asyncio.sleep(chance.uniform(0.0, 4.0))
        proxy.set_both(Way())
        await asyncio.sleep(chance.uniform(0.0, 2.0))
