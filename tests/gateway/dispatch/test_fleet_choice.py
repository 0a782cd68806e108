"""A fleet of several workers chooses by what they tell, over real sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from adapters.reference import AdapterRef
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.run import Work, version_needed
from gateway.exceptions import NoWorker
from memory.page_key import PAGE_TOKENS
from tests.scripted_worker import Reply, ScriptedWorker
from tests.waiting import eventually
from workers.wire.client import WorkerClient
from workers.wire.frames import OLDEST_VERSION, PROTOCOL_VERSION
from workers.wire.prefix_index import Prefix, changed_pages
from workers.wire.protocol import ALL_TOKENS, Generate, SamplingParams
from workers.wire.status import AdapterStatus, ModelStatus, WorkerStatus

MODEL = "m"


class Setup:
    def __init__(self, workers: list[ScriptedWorker], clients: list[WorkerClient]) -> None:
        self.workers = workers
        self.clients = clients
        self.fleet = Fleet(clients, rng=random.Random(7))

    async def report(self, number: int, *adapters: str, waiting_tokens: int = 0) -> None:
        model = ModelStatus(
            *(MODEL, MODEL, 0, 0, 0, 0, 0, 0, 0, 0),
            max_num_seqs=8,
            num_waiting_tokens=waiting_tokens,
            prefill_tokens_per_s=1000.0,
            decode_step_s=0.02,
        )
        held = [AdapterStatus(digest, "device", 1 << 20, 0, False) for digest in adapters]
        status = WorkerStatus(f"w{number}", False, [model], held, 0, "", {}, 0, 0.0)
        before = self.clients[number].status
        self.workers[number].server.deliver([(0, status)])
        await eventually(lambda: self.clients[number].status is not before)

    def chosen(self, work: Work, *excluded: WorkerClient) -> int:
        """Who is sent it."""
        worker = self.fleet.choose(work, excluded)
        self.fleet.note_sent(worker, work)
        return self.clients.index(worker)


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        workers = [
            await stack.enter_async_context(
                ScriptedWorker(f"unix:{tmp_path}/{i}", [MODEL], lambda _: Reply([1]))
            )
            for i in range(3)
        ]
        clients = [WorkerClient(worker.address) for worker in workers]
        running = [tasks.create_task(client.run()) for client in clients]
        await eventually(lambda: all(client.is_ready for client in clients))
        yield Setup(workers, clients)
        for task in running:
            task.cancel()


def generate(
    tokens: list[int] | None = None,
    adapter: str | None = None,
    domain: str = "d",
    params: SamplingParams = SamplingParams(1, 0),  # noqa: B008
) -> Generate:
    ref = None if adapter is None else AdapterRef(adapter)
    return Generate(0, "", MODEL, tokens or [1] * 100, params, domain, ref)


def work(tokens: list[int] | None = None, adapter: str | None = None, domain: str = "d") -> Work:
    return Work.of([generate(tokens, adapter, domain)])


async def test_whoever_is_excluded_gets_nothing_and_then_nobody_is_left(setup: Setup) -> None:
    for number in range(3):
        await setup.report(number)
    first, second, third = setup.clients
    assert setup.chosen(work(), first, third) == 1
    with pytest.raises(NoWorker):
        setup.chosen(work(), first, second, third)
    setup.fleet.clients.remove(second)
    with pytest.raises(NoWorker):
        setup.chosen(work(), first, third)


async def test_a_worker_of_the_version_before_gets_nothing_that_it_does_not_know(
    setup: Setup,
) -> None:
    """It would answer without it, as if it had not been asked for."""
    for number in range(3):
        await setup.report(number)
    needed = version_needed(0, (7,))
    assert needed == version_needed(ALL_TOKENS, ()) == PROTOCOL_VERSION
    assert version_needed(None, ()) == version_needed(20, ()) == OLDEST_VERSION
    new = Work.of([generate([1], params=SamplingParams(1, 0, logprobs=0, logprob_token_ids=(7,)))])
    assert new.least_version == needed
    first, second, third = setup.clients
    first.version = third.version = OLDEST_VERSION
    assert {setup.chosen(new) for _ in range(20)} == {1}
    assert len({setup.chosen(work()) for _ in range(30)}) == 3
    second.version = OLDEST_VERSION
    with pytest.raises(NoWorker, match="This request needs a worker that speaks protocol 7"):
        setup.chosen(new)


async def test_the_adapter_s_holder_until_it_is_busy(setup: Setup) -> None:
    for number in range(3):
        await setup.report(number, *(["a"] if number == 1 else []))
    assert setup.chosen(work(adapter="a")) == 1
    assert len({setup.chosen(work(adapter="a")) for _ in range(30)}) == 3
    for number in range(3):
        await setup.report(number, "a", waiting_tokens=0 if number == 2 else 5000)
    # Two of each kind are weighed, so it is left out at times.
    assert [setup.chosen(work(adapter="a")) for _ in range(30)].count(2) > 15


async def test_the_holder_of_the_prompt_and_of_no_other_domain_s(setup: Setup) -> None:
    for number in range(3):
        await setup.report(number)
    tokens = list(range(6 * PAGE_TOKENS))
    prefix = Prefix(generate(tokens))
    layout = setup.clients[0].models[MODEL].cache_layout
    for frame in changed_pages(MODEL, prefix.keys(layout), ()):
        setup.workers[2].server.deliver([(0, frame)])
    index = setup.clients[2].prefixes
    await eventually(lambda: index.num_cached(prefix, layout) == len(tokens))
    assert setup.chosen(work([*tokens, 1])) == 2
    assert index.num_cached(Prefix(generate(tokens, domain="other")), layout) == 0
    assert len({setup.chosen(work(tokens, domain="other")) for _ in range(30)}) == 3
    await setup.workers[2].server.close()
    await eventually(lambda: not setup.clients[2].is_ready)
    assert setup.clients[2].prefixes.num_cached(prefix, layout) == 0
    assert setup.chosen(work(tokens)) != 2


async def test_a_worker_that_has_told_nothing_yet_waits_for_its_turn(setup: Setup) -> None:
    await setup.report(0, waiting_tokens=100_000)
    assert {setup.chosen(work()) for _ in range(20)} == {0}


async def test_an_address_that_has_never_answered_is_absent_and_not_lost(tmp_path: Path) -> None:
    """Settings may name more addresses than there are workers."""
    async with asyncio.TaskGroup() as tasks:
        client, nobody = WorkerClient(f"unix:{tmp_path}/w"), WorkerClient(f"unix:{tmp_path}/none")
        fleet = Fleet([client, nobody])
        running = [tasks.create_task(each.run()) for each in (client, nobody)]
        async with ScriptedWorker(client.address, [MODEL], lambda _: Reply([1])):
            await eventually(lambda: fleet.states()["ready"] == 1)
            assert fleet.states() | {"ready": 0} == dict.fromkeys(fleet.states(), 0) | {"absent": 1}
        await eventually(lambda: fleet.states()["lost"] == 1)
        assert fleet.states()["absent"] == 1
        for task in running:
            task.cancel()
