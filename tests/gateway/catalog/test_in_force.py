"""Who is told of a change finds it in force, though gateways load changes together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapters.format.validator import CONFIG_NAME, WEIGHTS_NAME
from admin.http.plane import AdminConfig
from store.database import Database
from tests.adapters.files import write_adapter
from tests.admin.serve import administration
from tests.gateway.live import GatewayPlane, Live
from tests.gateway.pepper import PEPPER
from tests.waiting import eventually


class Told:
    """The admin plane beside the gateway that it tells."""

    def __init__(self, client: httpx.AsyncClient, plane: GatewayPlane) -> None:
        self.plane = plane
        self._client = client
        self._number = 0

    async def ask(self, method: str, path: str, **arguments: Any) -> None:
        """A change just before it: what comes now is loaded later."""
        self._number += 1
        for request in (
            self._client.build_request("POST", "tenants", json={"name": f"t-{self._number}"}),
            self._client.build_request(method, path, **arguments),
        ):
            answer = await self._client.send(request)
            assert answer.is_success, answer.text

    async def version(self) -> str:
        """That answers now."""
        return (await self.plane.complete("bot")).headers["loraplex-adapter-version"]


@pytest.fixture
async def told(live: Live, dsn: str) -> AsyncIterator[Told]:
    async with live.worker, live.gateway() as plane, _administration(live, dsn) as client:
        await eventually(lambda: plane.serves("tiny"))
        yield Told(client, plane)


async def test_an_alias_is_moved(live: Live, told: Told) -> None:
    await live.make_ready("a", "b")
    await eventually(lambda: told.plane.serves("bot"))
    for version in (2, 1, 2):
        path = "adapters/bot/aliases/prod?tenant=acme"
        await told.ask("PUT", path, json={"version": version})
        assert await told.version() == str(version)


async def test_an_alias_is_moved_by_an_upload_of_what_is_there(told: Told, tmp_path: Path) -> None:
    async def push(seed: int) -> None:
        folder = tmp_path / f"{seed}"
        write_adapter(folder, seed=seed)
        files = {name: (folder / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)}
        form = {"name": "bot", "tenant": "acme", "alias": "prod"}
        await told.ask("POST", "adapters", data=form, files=files)

    for seed in (1, 2):
        await push(seed)
        await eventually(lambda seed=seed: _answers(told, str(seed)))
    await push(1)
    assert await told.version() == "1"


async def test_a_tenant_is_deleted(told: Told) -> None:
    await told.ask("DELETE", "tenants/acme")
    assert (await told.plane.complete("tiny")).status_code == 401


async def test_a_price_is_set(live: Live, told: Told) -> None:
    await told.ask("PUT", "prices/tiny", json={"input": "1", "output": "1"})
    await told.plane.complete("tiny")
    query = "SELECT cost FROM usage ORDER BY admitted_at DESC LIMIT 1"

    async def costs() -> bool:
        return bool(rows := await live.fetch(query)) and rows[0]["cost"] > 0

    await eventually(costs)


async def test_a_quota_is_lifted(live: Live, told: Told) -> None:
    await live.limit(requests_per_minute=0)
    await told.ask("DELETE", "tenants/acme/quota")
    assert await told.plane.serves("tiny")


async def _answers(told: Told, version: str) -> bool:
    return await told.plane.serves("bot") and await told.version() == version


@asynccontextmanager
async def _administration(live: Live, dsn: str) -> AsyncIterator[httpx.AsyncClient]:
    own = await Database.connect(dsn)
    config = AdminConfig(pepper=PEPPER)
    async with administration(own, live.folder / "admin-store", config) as client:
        yield client
    await own.close()
