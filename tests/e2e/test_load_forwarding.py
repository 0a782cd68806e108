"""vLLM's load and unload routes where gateway and admin plane are processes of their own: the
gateway checks the key and the size, and forwards the request as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

from adapters.format.validator import CONFIG_NAME, WEIGHTS_NAME
from admin.keys.keys import create_key
from admin.tenants.tenants import find_tenant
from tests.e2e.cluster import Asked, Cluster, running_cluster
from tests.gateway.pepper import PEPPER
from tests.plane import Plane

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MAX_UPLOAD = 8 << 20


@dataclass
class Split:
    """A cluster with an admin plane in a process of its own."""

    cluster: Cluster
    admin: Plane
    infers: str
    """A key of acme's that may not load."""

    def client(self, gateway: str, key: str | None = None) -> httpx.AsyncClient:
        return self.cluster.gateways[gateway].new_client(key or self.cluster.keys["acme"])

    def folder(self, name: str) -> Path:
        return self.cluster.setup.folder / "adapters" / name


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def split(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Split]:
    folder = tmp_path_factory.mktemp("split")
    async with running_cluster(folder, num_workers=1, num_gateways=0) as cluster:
        async with cluster.database.transaction() as connection:
            tenant = await find_tenant(connection, "acme")
            _, infers = await create_key(connection, PEPPER, tenant.id, frozenset({"inference"}))
        admin = cluster.product(
            *("admin", "admin"),
            management_port=0,
            max_upload=MAX_UPLOAD,
            trusted_proxies="127.0.0.1",
            adapter_roots=f"*={cluster.setup.folder / 'adapters'}",
        )
        await admin.start()
        addresses = [worker.address for worker in cluster.workers.values()]
        forwards = {"admin_url": admin.url, "max_upload": MAX_UPLOAD, "management_port": 0}
        try:
            await cluster.add_gateway("forwards", addresses, **forwards).start()
            await cluster.add_gateway("alone", addresses, management_port=0).start()
            yield Split(cluster, admin, infers)
        finally:
            await admin.kill()


async def test_a_gateway_forwards_loads_and_unloads(split: Split) -> None:
    async with split.client("forwards") as client:
        path = str(split.folder("a000"))
        answer = await client.post(LOAD, json={"lora_name": "policy", "lora_path": path})
        assert answer.status_code == 200, answer.text
        assert answer.text == "Success: LoRA adapter 'policy' added successfully."
        assert answer.headers["loraplex-adapter-version"] == "1"
        asked = Asked(prompt=tuple(range(20)), max_tokens=4, model="policy")
        assert len((await split.cluster.ask("forwards", asked)).tokens) == 4
        files = {
            name: (name, (split.folder("a001") / name).read_bytes())
            for name in (CONFIG_NAME, WEIGHTS_NAME)
        }
        form = {"lora_name": "policy", "load_inplace": "true"}
        inline = await client.post(LOAD, data=form, files=files)
        assert inline.status_code == 200, inline.text
        removed = await client.post(UNLOAD, json={"lora_name": "policy"})
        assert removed.text == "Success: LoRA adapter 'policy' removed successfully."
        with pytest.raises(openai.NotFoundError):
            await split.cluster.ask("forwards", asked)
        again = await client.post(UNLOAD, json={"lora_name": "policy"})
        assert (again.status_code, again.json()["error"]["reason"]) == (404, "adapter_not_found")
    async with split.cluster.database.transaction() as connection:
        row = await connection.fetchrow(
            "SELECT request_id, address FROM audit_log WHERE object = 'policy@1' ORDER BY seq"
        )
    assert row is not None
    assert (row["request_id"], row["address"]) == (answer.headers["x-request-id"], "127.0.0.1")


async def test_a_gateway_refuses_before_it_forwards(split: Split) -> None:
    """What has no key that may load, or too many bytes, never reaches the admin plane."""
    refusals = [
        ("lpx_" + "x" * 40, 401, "invalid_api_key"),
        (split.infers, 403, "insufficient_scope"),
    ]
    body = {"lora_name": "policy", "lora_path": "/"}

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(MAX_UPLOAD // (1 << 20) + 2):
            yield bytes(1 << 20)

    assert split.admin.log is not None
    num_lines = len(split.admin.log.read_text().splitlines())
    for key, status, reason in refusals:
        async with split.client("forwards", key) as client:
            answer = await client.post(LOAD, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["reason"]) == (status, status, reason)
    async with split.client("forwards") as client:
        large = {"file": ("a.tar", bytes(MAX_UPLOAD + (1 << 20) + 1))}
        answer = await client.post(LOAD, data={"lora_name": "policy"}, files=large)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (413, "request_too_large")
        assert len(split.admin.log.read_text().splitlines()) == num_lines
        kind = {"content-type": "multipart/form-data; boundary=x"}
        answer = await client.post(LOAD, content=chunks(), headers=kind)
        assert answer.status_code in (400, 413), answer.text


async def test_without_an_admin_plane_there_is_no_such_route(split: Split) -> None:
    async with split.client("alone") as client:
        assert (await client.post(LOAD, json={})).status_code == 404


async def test_an_admin_plane_that_is_away_is_told_by_name(split: Split) -> None:
    await split.admin.kill()
    async with split.client("forwards") as client:
        answer = await client.post(UNLOAD, json={"lora_name": "policy"})
    assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "admin_unavailable")
    assert answer.headers["retry-after"] == "1"
