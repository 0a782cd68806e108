"""Floods of refused requests: another tenant hardly notices one, and clients that ask again at once
keep no prompt from being served. `python -m benchmarks.refusals` prints the figures."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.cluster import Cluster
from tests.e2e.floods import (
    NO_TOKEN,
    finished_per_s,
    flooded,
    flooding,
    large_request,
    limit,
    other_tenant,
)
from tests.e2e.shares import HEAVY, ORDINARY
from tests.scale import IS_FULL, scaled

SECONDS = scaled(2, 60)

pytestmark = [pytest.mark.full, pytest.mark.soak, pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with flooded(tmp_path_factory.mktemp("flooded")) as cluster:
        yield cluster


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("limits", "last_token"),
    [({"requests_per_minute": 3}, 0), ({"concurrent_requests": 1}, 0), ({}, NO_TOKEN)],
)
async def test_another_tenant_hardly_notices_a_flood(
    cluster: Cluster, limits: dict[str, int], last_token: int
) -> None:
    """Of large requests that are refused for a limit of their tenant, or once they are read."""
    url, keys = cluster.gateways["gateway-0"].url, cluster.keys
    await limit(cluster, HEAVY, **limits)
    alone = await other_tenant(url, keys[ORDINARY[0]], SECONDS) if IS_FULL else None
    body = large_request(random.Random(0), last_token)
    async with flooding(url, keys[HEAVY], body) as answers:
        beside = await other_tenant(url, keys[ORDINARY[0]], SECONDS)
    print(f"\n{limits}\nalone  {alone}\nbeside {beside}\n{answers}")
    assert answers.num_refused > 0
    assert beside.num_served == beside.num_asked
    if alone is not None:
        assert beside.p99_ttft_s <= 1.5 * alone.p99_ttft_s
        assert beside.p99_gap_s <= 1.5 * alone.p99_gap_s


@pytest.mark.asyncio(loop_scope="module")
async def test_clients_that_ask_again_at_once_keep_no_prompt_from_being_served(
    cluster: Cluster,
) -> None:
    url, key = cluster.gateways["gateway-0"].url, cluster.keys[ORDINARY[1]]
    impatient, answers = await finished_per_s(url, key, SECONDS, is_patient=False)
    assert answers.num_refused > 0
    assert impatient > 0
    if IS_FULL:
        patient, _ = await finished_per_s(url, key, SECONDS, is_patient=True)
        print(f"\n{patient:.2f} prompts/s, {impatient:.2f} of clients that do not wait\n{answers}")
        assert impatient >= 0.7 * patient
