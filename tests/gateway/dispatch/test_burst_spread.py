"""A burst at two workers that are alike: neither gets most of it, whatever each gateway knows."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet_simulator import PREFILL_TOKENS_PER_S, Clock, Machine, Request, Worker
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.run import Work
from tests.gateway.dispatch.test_failover import Trio
from tests.gateway.scripts import say
from tests.scripted_worker import DIGEST
from workers.wire.frames import OLDEST_VERSION
from workers.wire.prefix_index import PrefixIndex
from workers.wire.protocol import Generate, ModelInfo, SamplingParams
from workers.wire.status import ModelStatus, WorkerStatus

MODEL = "0"
NUM_REQUESTS = 200
PROMPTS, ANSWER = range(600, 801), 64
LARGEST_PART = 0.6


class Client:
    """One gateway's end of a simulated worker."""

    version = OLDEST_VERSION
    is_ready, is_silent = True, False

    def __init__(self, clock: Clock, worker: Worker) -> None:
        self.models = {MODEL: ModelInfo(MODEL, MODEL, 4096)}
        self.prefixes = PrefixIndex()
        self.status: WorkerStatus | None = None
        self.status_at = 0.0
        self.num_open = self.num_open_then = 0
        self._clock = clock
        self._worker = worker

    def send(self, request: Request, delay_s: float) -> None:
        self.num_open += 1
        self._clock.at(self._clock.now + delay_s, self._worker.submit, request)
        self._clock.at(self._clock.now + delay_s, self._look, request)

    def report(self, status: WorkerStatus) -> None:
        self.status, self.status_at = status, self._clock.now
        self.num_open_then = self.num_open

    def _look(self, request: Request) -> None:
        """Until the request has ended."""
        if request.end_s:
            self.num_open -= 1
        else:
            self._clock.at(self._clock.now + 0.05, self._look, request)


class Burst:
    """Requests within a second or two, through several gateways, each of which waits for the
    limits of a request after it has chosen its worker, and a while after for it to get there."""

    def __init__(self, seed: int, num_gateways: int) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = Clock()
        self.num_sent = [0, 0]
        machine = Machine(num_rows=rng.choice([16, 32, 64]), speed=rng.choice([0.2, 0.5, 1.0]))
        rate = machine.speed * PREFILL_TOKENS_PER_S
        self.workers = [
            Worker(
                *(self.clock, machine, number, {}, self._report),
                _prefilled=(rate * rng.uniform(0.9, 1.1), 1.0),
            )
            for number in range(2)
        ]
        self.clients = [
            [Client(self.clock, worker) for worker in self.workers] for _ in range(num_gateways)
        ]
        clients: Any = self.clients
        self.fleets = [
            Fleet(each, clock=lambda: self.clock.now, rng=random.Random(rng.random()))
            for each in clients
        ]
        for worker in self.workers:
            self._report(worker.number, worker.status())
            self.clock.at(rng.random(), worker.tell)

    def run(self) -> None:
        rng, seconds = self.rng, self.rng.choice([0.05, 0.5, 2.0])
        begin_s = rng.uniform(2.0, 3.0)
        for _ in range(NUM_REQUESTS):
            length = rng.choice(PROMPTS)
            request = Request(0.0, 0, None, 0, [(rng.random(), length)], ANSWER)
            self.clock.at(begin_s + rng.uniform(0, seconds), self._choose, request)
        self.clock.run(lambda: sum(self.num_sent) == NUM_REQUESTS)

    def _choose(self, request: Request) -> None:
        number = self.rng.randrange(len(self.fleets))
        fleet, clients = self.fleets[number], self.clients[number]
        params = SamplingParams(1, 0)
        work = Work.of([Generate(0, "", MODEL, [0] * request.num_tokens, params, "")])
        chosen: Any = fleet.choose(work)
        claim = ExitStack()
        claim.enter_context(fleet.claimed(chosen, work))
        limits_s = self.rng.uniform(0.0, 0.2)
        self.clock.at(
            self.clock.now + limits_s, self._send, claim, request, clients.index(chosen), chosen
        )

    def _send(self, claim: ExitStack, request: Request, number: int, client: Client) -> None:
        claim.close()
        self.num_sent[number] += 1
        client.send(request, self.rng.uniform(0.0, 0.05))

    def _report(self, number: int, status: WorkerStatus) -> None:
        for clients in self.clients:
            delay_s = self.rng.uniform(0.0, 0.05)
            self.clock.at(self.clock.now + delay_s, clients[number].report, status)


def test_requests_that_wait_for_their_limits_count_at_their_workers(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have chosen before the first is sent."""
    trio, num_requests = Trio(store), 30
    with trio:
        trio.script(say("here"))
        trio.wait_for(lambda: all(client.is_ready for client in trio.gateway.fleet.clients))
        for number, worker in enumerate(trio.workers):
            # One of them looks best, if only by a token.
            status = ModelStatus(
                *(DIGEST, "tiny", 0, 0, 0, 0, 0, 0, 0, 0),
                prefill_tokens_per_s=1.0,
                num_waiting_tokens=number,
            )
            trio.call(partial(worker.report, models=[status]))
        trio.wait_for(lambda: all(client.status for client in trio.gateway.fleet.clients))
        admission = trio.gateway.admission
        reserve, num_held = admission.reserve, 0

        async def held(*args: Any, **options: Any) -> Any:
            nonlocal num_held
            num_held += 1
            while num_held < num_requests:
                await asyncio.sleep(0.01)
            return await reserve(*args, **options)

        monkeypatch.setattr(admission, "reserve", held)
        with ThreadPoolExecutor(num_requests) as pool:
            answers = [pool.submit(trio.ask) for _ in range(num_requests)]
        assert {answer.result().status_code for answer in answers} == {200}
        assert min(trio.num_sent) >= 0.2 * num_requests, trio.num_sent


@pytest.mark.parametrize("num_gateways", [1, 2, 4])
def test_of_a_burst_no_worker_gets_most(num_gateways: int) -> None:
    parts: list[float] = []
    for seed in range(20):
        burst = Burst(seed, num_gateways)
        burst.run()
        parts.append(max(burst.num_sent) / NUM_REQUESTS)
    assert max(parts) <= LARGEST_PART, parts
