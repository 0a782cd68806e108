"""A gateway that starts takes nobody before it knows whom to serve, and is none the less soon there
to say that it does not know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from gateway.app import START_WAIT_S, create_app
from gateway.config import GatewayConfig
from store.records import CatalogSnapshot
from tests.gateway.pepper import PEPPER
from tests.gateway.service import FedSource, Keys, snapshot
from tests.plane import Plane


class LateSource(FedSource):
    def __init__(self, first: CatalogSnapshot, after_s: float) -> None:
        super().__init__(first)
        self._after_s = after_s

    async def snapshots(self) -> AsyncIterator[CatalogSnapshot]:
        await asyncio.sleep(self._after_s)
        async for each in super().snapshots():
            yield each


async def first_answer(store: Path, wal: Path, path: str, after_s: float) -> httpx.Response:
    """To a request that is there as soon as somebody takes it."""
    keys = Keys()
    config = GatewayConfig(model_folder=store.joinpath, pepper=PEPPER, wal=wal)
    app = create_app(config, source=LateSource(snapshot(keys.records), after_s), clients=[])
    headers = {"authorization": f"Bearer {keys.acme}"}
    async with (
        Plane(app) as plane,
        httpx.AsyncClient(base_url=plane.url, headers=headers) as client,
    ):
        return await client.get(path, timeout=10 * START_WAIT_S)


async def test_who_came_first_is_served(store: Path, tmp_path: Path) -> None:
    answer = await first_answer(store, tmp_path, "/v1/models", after_s=0.3)
    assert answer.status_code == 200 and answer.json()["data"]


async def test_without_a_catalog_it_says_so(store: Path, tmp_path: Path) -> None:
    answer = await first_answer(store, tmp_path, "/readyz", after_s=3600)
    assert answer.status_code == 503
    assert answer.json()["reason"] == "the catalog is not loaded"
