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
from tests.e2e.fleet import FleetPlane, FleetSetup
from tests.e2e.tiny import NAME
from workers.models.plan import ModelPlan

pytestmark = pytest.mark.full

OTHER = "other"
PATIENCE_S = 90.0
"""With a shift of the traffic: a policy that works takes a few seconds of it."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetPlane]:
    setup = FleetSetup(tmp_path_factory.mktemp("fleet"), 0, [OTHER])
    plan = ModelPlan.read(setup.tiny.model, setup.tiny.shape.digest, torch.float32)
    room = 7 * plan.max_bytes(select("cpu")) // 4
    async with setup.plane(2, device_memory=room) as plane:
        yield plane


def num_swaps(plane: FleetPlane) -> int:
    return sum(each.num_swaps for status in plane.statuses for each in status.models)


async def send(plane: FleetPlane, models: Sequence[str], count: int, concurrency: int) -> None:
    """So many requests, each for one of the models; then all workers tell of themselves."""
    rng = random.Random(count)

    def draw() -> tuple[str, list[int]]:
        return rng.choice(models), [rng.randrange(256) for _ in range(60)]

    await plane.ask_many(draw, count, concurrency)
    await plane.told()


async def send_until_parted(plane: FleetPlane) -> None:
    """Requests for both models, until each worker has one and a round of them swaps nothing, which
    is so only if every request goes where its model is."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            before = num_swaps(plane)
            await send(plane, [NAME, OTHER], 40, concurrency=4)
            is_parted = sorted(plane.holders_of(NAME) + plane.holders_of(OTHER)) == [*plane.workers]
            if is_parted and num_swaps(plane) == before:
                return


async def send_until_shared(plane: FleetPlane) -> None:
    """Requests for one model, more than a worker has rows for, until both workers have it."""
    async with asyncio.timeout(PATIENCE_S):
        while plane.holders_of(NAME) != [*plane.workers]:
            await send(plane, [NAME], 100, concurrency=32)


@pytest.mark.asyncio(loop_scope="module")
async def test_models_part_and_shift_with_the_traffic(plane: FleetPlane) -> None:
    await send_until_parted(plane)
    await send_until_shared(plane)
    await send_until_parted(plane)
