"""Load on a server: clients that wait for each answer, or requests at random moments."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator

from loraplex.load.client import Call, Client, Outcome

MAX_OPEN = 4096
"""Requests of an open loop that wait for their answers; what comes beyond is not sent."""

OnEnd = Callable[[Outcome], None]


async def closed_loop(
    client: Client,
    calls: Iterator[Call],
    concurrency: int,
    on_end: OnEnd,
    *,
    seconds: float | None = None,
) -> None:
    """`concurrency` requests at a time, until there is no call left or no second; those under way
    are waited for."""
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
    """Requests at random moments (Poisson), `rate` a second on average, whatever became of those
    before them. Times count from when a request was due, also where this process was late."""
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
