"""`loraplex admin`: the admin plane in a process of its own, beside no gateway."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from store.database import Database
from tests.admin.serve import admin_key, admin_process


async def test_it_administers_and_does_not_infer(dsn: str, database: Database, tmp_path: Path):
    key = await admin_key(database)
    async with (
        admin_process(tmp_path, dsn, tmp_path / "store") as plane,
        plane.new_client() as client,
    ):
        for probe in ("livez", "readyz", "health", "version"):
            assert (await client.get(probe)).status_code == 200
        assert (await client.get("admin/v1/tenants")).status_code == 401
        client.headers["authorization"] = f"Bearer {key}"
        made = await client.post("admin/v1/tenants", json={"name": "acme"})
        assert made.status_code == 201, made.text
        usage = await client.get("v1/organization/usage/completions?start_time=0&limit=1")
        assert usage.status_code == 200, usage.text
        refused = await client.get("v1/models")
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "route_not_found"
        assert await plane.end() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{plane.url}/livez")
