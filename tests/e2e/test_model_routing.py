"""Two workers with room for one of two base models each: requests go where their model is, and when
the traffic shifts so do the models."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
import torch

from ops.registry import select
from tests.e2e.fleet import House, Served
from tests.e2e.tiny import NAME
from workers.models.plan import ModelPlan

pytestmark = pytest.mark.full

OTHER = "other"
PATIENCE_S = 90.0
"""With a shift of the traffic: a policy that works takes a few seconds of it."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    house = House(tmp_path_factory.mktemp("fleet"), 0, [OTHER])
    plan = ModelPlan.read(house.tiny.model, house.tiny.shape.digest, torch.float32)
    room = 7 * plan.max_bytes(select("cpu")) // 4
    async with house.served(2, device_memory=room) as served:
        yield served


def num_swaps(served: Served) -> int:
    return sum(each.num_swaps for status in served.statuses for each in status.models)


async def send(served: Served, models: Sequence[str], count: int, concurrency: int) -> None:
    """So many requests, each for one of the models; then all workers tell of themselves."""
    rng = random.Random(count)

    def draw() -> tuple[str, list[int]]:
        return rng.choice(models), [rng.randrange(256) for _ in range(60)]

    await served.ask_many(draw, count, concurrency)
    await served.told()


async def send_until_parted(served: Served) -> None:
    """Requests for both models, until each worker has one and a round of them swaps nothing, which
    is so only if every request goes where its model is."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            before = num_swaps(served)
            await send(served, [NAME, OTHER], 40, concurrency=4)
            is_parted = sorted(served.holders_of(NAME) + served.holders_of(OTHER)) == [
                *served.workers
            ]
            if is_parted and num_swaps(served) == before:
                return


async def send_until_shared(served: Served) -> None:
    """Requests for one model, more than a worker has rows for, until both workers have it."""
    async with asyncio.timeout(PATIENCE_S):
        while served.holders_of(NAME) != [*served.workers]:
            await send(served, [NAME], 100, concurrency=32)


@pytest.mark.asyncio(loop_scope="module")
async def test_models_part_and_shift_with_the_traffic(served: Served) -> None:
    await send_until_parted(served)
    await send_until_shared(served)
    await send_until_parted(served)
