"""Loops that send a load: clients that wait for each answer, or requests at random times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator

from loraplex.load.client import Call, Client, Outcome

MAX_OPEN = 4096
"""Maximum number of requests in flight in an open loop. Any further request is not sent, but
recorded as failed."""

OnEnd = Callable[[Outcome], None]


async def closed_loop(
    client: Client,
    calls: Iterator[Call],
    concurrency: int,
    on_end: OnEnd,
    *,
    seconds: float | None = None,
) -> None:
    """Keeps `concurrency` requests in flight until there are no more calls or `seconds` have
    passed. Then waits for the requests in flight."""
    stop_s = None if seconds is None else time.perf_counter() + seconds

    async def work() -> None:
        while stop_s is None or time.perf_counter() < stop_s:
            if (call := next(calls, None)) is None:
                return
            on_end(await client.send(call))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(work())


async def open_loop(
    client: Client,
    calls: Iterator[Call],
    rate: float,
    on_end: OnEnd,
    *,
    rng: random.Random,
    seconds: float | None = None,
) -> None:
    """Sends requests at random times (a Poisson process) with an average of `rate` per second,
    regardless of earlier requests. Times are measured from when a request was due, even if this
    process sent it late."""
    begun_s = due_s = time.perf_counter()
    num_open = 0

    async def send(call: Call, due_s: float) -> None:
        nonlocal num_open
        try:
            on_end(await client.send(call, due_s))
        finally:
            num_open -= 1

    async with asyncio.TaskGroup() as tasks:
        for call in calls:
            due_s += rng.expovariate(rate)
            if seconds is not None and due_s >= begun_s + seconds:
                return
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            if num_open >= MAX_OPEN:
                outcome = Outcome(call.group, due_s)
                outcome.fail("not_sent", f"{MAX_OPEN} requests wait for their answers")
                outcome.ended_s = due_s
                on_end(outcome)
                continue
            num_open += 1
            tasks.create_task(send(call, due_s))
