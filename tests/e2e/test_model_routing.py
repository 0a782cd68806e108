"""Two workers with room for one of two base models each: requests go where their model is, and when
the traffic shifts so do the models."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
import torch

from tests.e2e.fleet import House, RoundRobin, Served
from tests.e2e.tiny import NAME
from workers.models.plan import ModelPlan

OTHER = "other"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    house = House(tmp_path_factory.mktemp("fleet"), 0, [OTHER])
    plan = ModelPlan.read(house.tiny.model, house.tiny.shape.digest, torch.float32)
    room = 7 * plan.max_bytes(torch.float32) // 4
    async with house.served(2, device_memory=room) as served:
        yield served


def holders(served: Served, model: str) -> list[int]:
    """Numbers of the workers that have it on the device."""
    return [
        number
        for number, status in enumerate(served.statuses)
        if any(each.name == model and each.tier == "device" for each in status.models)
    ]


async def send(served: Served, models: Sequence[str], count: int, *, concurrency: int = 4) -> int:
    """So many requests, each for one of the models. Returns how often a model was swapped in."""
    rng = random.Random(count)

    def draw() -> tuple[str, list[int]]:
        return rng.choice(models), [rng.randrange(256) for _ in range(60)]

    def num_swaps() -> int:
        return sum(each.num_swaps for status in served.statuses for each in status.models)

    before = num_swaps()
    await served.ask_many(draw, count, concurrency)
    await served.told()
    return num_swaps() - before


@pytest.mark.asyncio(loop_scope="module")
async def test_models_part_and_shift_with_the_traffic(served: Served) -> None:
    both = [NAME, OTHER]
    await send(served, both, 40)
    num_swaps = await send(served, both, 100)
    assert sorted(holders(served, NAME) + holders(served, OTHER)) == [0, 1]

    await send(served, [NAME], 300, concurrency=32)
    assert holders(served, NAME) == [0, 1]

    await send(served, both, 40)
    num_swaps += await send(served, both, 100)
    assert sorted(holders(served, NAME) + holders(served, OTHER)) == [0, 1]

    served.gateway.fleet = RoundRobin(served.gateway.fleet.clients)
    by_turns = await send(served, both, 200)
    print(f"\nswaps of 200 requests: {num_swaps}, by turns {by_turns}")
    assert num_swaps < by_turns / 4
