"""`python -m benchmarks.routing`: compares the gateway's routing policy with simpler policies, in a
simulation.

There are several gateways, none of which knows the requests of the others, and workers that report
their status once a second (fleet_simulator.py). Every policy gets the same requests. The simulation
is seeded and has no wall clock.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from adapters.reference import AdapterRef
from benchmarks.fleet_simulator import Clock, Machine, Request, Worker
from gateway.dispatch.routing import best, weigh
from gateway.dispatch.run import Work
from gateway.dispatch.standings import Report, Standing, Workers
from workers.wire.protocol import Generate, SamplingParams
from workers.wire.status import WorkerStatus

ADAPTER_SIZES = [20 << 20, 40 << 20, 80 << 20, 160 << 20]
"""Bytes of adapters of ranks 8 to 64."""
NUM_GATEWAYS = 4
WARM = 0.5
"""Share of the requests that come first, which only fill caches and are not measured."""


@dataclass(frozen=True)
class Workload:
    """Workload of the simulation. `requests_per_s` is the mean rate per worker."""

    name: str
    requests_per_s: float
    machine: Machine = field(default_factory=Machine)
    num_adapters: int = 0
    """Number of adapters per worker."""
    zipf: float = 1.0
    hot: float = 0.0
    """Share of the requests that use the first adapter."""
    models: float = 0.0
    """Number of base models per worker. There is at least one base model in total."""
    shared_tokens: int = 0
    """Tokens of the prefix that all prompts of an adapter share."""
    is_chat: bool = False
    """Whether prompts continue earlier conversations."""
    slow_share: float = 0.0
    """Share of the workers that have a third of the speed."""

    def num_models(self, num_workers: int) -> int:
        return max(int(self.models * num_workers), 1)


WORKLOADS = [
    Workload("base model", 9),
    Workload("adapters", 8, num_adapters=10),
    Workload("one hot adapter", 8, num_adapters=10, hot=0.9),
    Workload("prefixes", 5, num_adapters=1, shared_tokens=800, is_chat=True),
    Workload("base models", 4, Machine(num_models=2), models=0.5),
    Workload("unequal workers", 6, slow_share=0.5),
    Workload("all of it", 4, Machine(num_models=2), 5, models=0.5, shared_tokens=500, is_chat=True),
]


def draw(workload: Workload, num_workers: int, num_requests: int, seed: int) -> list[Request]:
    """Returns random requests with Poisson arrivals. Adapters and base models have Zipf
    popularity."""
    rng = random.Random(seed)
    num_adapters = workload.num_adapters * num_workers
    sizes = [rng.choice(ADAPTER_SIZES) for _ in range(num_adapters)]
    popular = [1 / (rank + 1) ** workload.zipf for rank in range(num_adapters)]
    adapters = rng.choices(range(num_adapters), popular, k=num_requests) if popular else []
    num_models = workload.num_models(num_workers)
    weights = [1 / (rank + 1) for rank in range(num_models)]
    models = rng.choices(range(num_models), weights, k=num_requests)
    talks: defaultdict[int | None, list[tuple[object, int]]] = defaultdict(list)
    requests: list[Request] = []
    now = 0.0
    for number in range(num_requests):
        now += rng.expovariate(workload.requests_per_s * num_workers)
        adapter = adapters[number] if adapters else None
        if workload.hot and rng.random() < workload.hot:
            adapter = 0
        model = models[number] if adapter is None else adapter % num_models
        length = rng.randrange(200, 1800)
        num_output = rng.randrange(16, 240)
        shared = [(adapter, workload.shared_tokens)] if workload.shared_tokens else []
        talk = talks[adapter] if workload.is_chat else []
        going_on = [talk.pop(rng.randrange(len(talk)))] if talk and rng.random() < 0.75 else []
        before = (going_on or shared or [(None, 0)])[-1][1]
        if going_on:
            length //= 4
        segments = [*shared, *going_on, ((adapter, number), before + length)]
        if workload.is_chat and before + length < 8000:
            talk.append(segments[-1])
        size = sizes[adapter] if adapter is not None else 0
        requests.append(Request(now, model, adapter, size, segments, num_output))
    return requests


class Fleet:
    """Knowledge of the gateways: a standing for each gateway and worker, and the workers that cache
    each prompt segment."""

    def __init__(self, num_workers: int, clock: Clock) -> None:
        self.clock = clock
        self.rng = random.Random(0)
        self.holders: dict[object, dict[int, int]] = {}
        self.num_workers = num_workers
        self.gateways: list[Workers[int]] = [Workers() for _ in range(NUM_GATEWAYS)]

    def report(self, number: int, status: WorkerStatus) -> None:
        report = Report.of(status, {})
        for workers in self.gateways:
            workers.put(number, Standing(report, self.clock.now, NUM_GATEWAYS))


Choice = Callable[[Fleet, int, Request], int]
"""Routing policy: a function of the fleet, the gateway's number and the request that returns the
number of a worker."""


def ours(fleet: Fleet, gateway: int, request: Request) -> int:
    """Returns the worker that gateway/dispatch/routing.py chooses."""
    workers, work = fleet.gateways[gateway], _work(request)
    cached: dict[int, int] = {}
    for segment, _ in request.segments:
        cached |= fleet.holders.get(segment, {})
    number = best(weigh(work, workers, cached, fleet.clock.now, fleet.rng))
    workers.send(number, work, cached.get(number, 0), fleet.clock.now)
    return number


def round_robin() -> Choice:
    turns = [0, 17, 5, 11]

    def choose(fleet: Fleet, gateway: int, _: Request) -> int:
        turns[gateway] += 1
        return turns[gateway] % fleet.num_workers

    return choose


def least_loaded(fleet: Fleet, gateway: int, request: Request) -> int:
    """Returns the worker with the fewest running and waiting sequences, including sequences that
    this gateway has sent since the worker's report."""
    return _least(fleet, gateway, request, range(fleet.num_workers))


def affinity(fleet: Fleet, gateway: int, request: Request) -> int:
    """Returns the least loaded worker among workers that hold the adapter, or the base model if the
    request has no adapter. If there are none, returns the least loaded of all workers."""
    workers = fleet.gateways[gateway]
    if request.adapter is not None:
        near = workers.near(str(request.adapter))
    else:
        near = workers.resident(str(request.model))
    return _least(fleet, gateway, request, list(near) or range(fleet.num_workers))


def _least(fleet: Fleet, gateway: int, request: Request, among: Sequence[int]) -> int:
    workers = fleet.gateways[gateway]

    def load(index: int) -> tuple[float, float]:
        standing = workers.standings[index]
        known = sum(model.num_sequences for model in standing.report.models.values())
        return known + NUM_GATEWAYS * standing.num_more, fleet.rng.random()

    index = min(among, key=load)
    workers.send(index, _work(request), 0, fleet.clock.now)
    return index


def _work(request: Request) -> Work:
    adapter = None if request.adapter is None else AdapterRef(str(request.adapter))
    tokens, params = [0] * request.num_tokens, SamplingParams(1, 0)
    return Work.of([Generate(0, "", str(request.model), tokens, params, "", adapter)])


CHOICES: dict[str, Callable[[], Choice]] = {
    "ours": lambda: ours,
    "round robin": round_robin,
    "least loaded": lambda: least_loaded,
    "affinity": lambda: affinity,
}


@dataclass(frozen=True)
class Outcome:
    """Measurements of the requests after the first ones, which only fill caches. `mean`, `p50` and
    `p99` are seconds to the first token. `on_device` and `near` are shares of the requests, and
    `cached` is a share of the prompt tokens."""

    mean: float
    p50: float
    p99: float
    on_device: float
    near: float
    """Share of the requests whose adapter was on the device or in host memory."""
    cached: float
    swaps: int
    requests_per_s: float


def simulate(
    workload: Workload,
    choice: Choice,
    num_workers: int,
    num_requests: int,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Outcome:
    clock = Clock()
    fleet = Fleet(num_workers, clock)
    rng = random.Random(seed)
    workers: list[Worker] = []
    for number in range(num_workers):
        slow = rng.random() < workload.slow_share
        machine = replace(
            workload.machine,
            num_registered=workload.num_models(num_workers),
            speed=1 / 3 if slow else 1.0,
        )
        workers.append(Worker(clock, machine, number, fleet.holders, fleet.report))
        fleet.report(number, workers[-1].status())
        clock.at(rng.random(), workers[-1].tell)
    requests = draw(workload, num_workers, num_requests, seed)

    def arrive(number: int) -> None:
        request = requests[number]
        workers[choice(fleet, rng.randrange(NUM_GATEWAYS), request)].submit(request)
        if number % 1000 == 999:
            progress(1000)
        if number + 1 < num_requests:
            clock.at(requests[number + 1].arrival_s, arrive, number + 1)

    clock.at(requests[0].arrival_s, arrive, 0)
    left = iter(requests)
    head: Request = next(left)

    def is_over() -> bool:
        nonlocal head
        while head.end_s:
            following = next(left, None)
            if following is None:
                return True
            head = following
        return False

    clock.run(is_over)
    return judge(requests[int(WARM * num_requests) :], sum(w.num_swaps for w in workers))


def judge(requests: Sequence[Request], swaps: int) -> Outcome:
    times = sorted(request.ttft_s for request in requests)
    ends = sorted(request.end_s for request in requests)
    last = ends[int(0.99 * len(ends))]
    tokens = sum(request.num_tokens for request in requests)
    return Outcome(
        mean=sum(times) / len(times),
        p50=times[len(times) // 2],
        p99=times[int(0.99 * len(times))],
        on_device=sum(r.was_on_device for r in requests) / len(requests),
        near=sum(r.was_near for r in requests) / len(requests),
        cached=sum(r.num_cached for r in requests) / tokens,
        swaps=swaps,
        requests_per_s=0.99 * len(requests) / (last - requests[0].arrival_s),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="part of a workload's name")
    parser.add_argument("--choices", nargs="+", default=list(CHOICES), choices=list(CHOICES))
    options = parser.parse_args()
    table = Table(title=f"{options.workers} workers, {options.requests} requests each")
    for column in ("workload", "choice", "TTFT mean, ms", "p50", "p99", "on device", "or host"):
        table.add_column(column)
    for column in ("prompt cached", "swaps", "requests/s"):
        table.add_column(column)
    chosen = [w for w in WORKLOADS if options.only in w.name]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(chosen) * len(options.choices) * options.requests)
        for workload in chosen:
            for name in options.choices:
                progress.update(task, description=f"{workload.name}: {name}")
                sizes = options.workers, options.requests, options.seed
                outcome = simulate(
                    workload, CHOICES[name](), *sizes, lambda n: progress.update(task, advance=n)
                )
                table.add_row(workload.name, name, *_cells(outcome))
            table.add_section()
    Console(width=130).print(table)


def _cells(outcome: Outcome) -> list[str]:
    seconds = (outcome.mean, outcome.p50, outcome.p99)
    shares = (outcome.on_device, outcome.near, outcome.cached)
    return [
        *(f"{1000 * s:.0f}" for s in seconds),
        *(f"{share:.0%}" for share in shares),
        str(outcome.swaps),
        f"{outcome.requests_per_s:.0f}",
    ]


if __name__ == "__main__":
    main()
