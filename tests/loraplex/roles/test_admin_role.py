"""`loraplex admin`: the admin plane in a process of its own, beside no gateway."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from admin.keys.keys import create_key
from loraplex.probe import answers_ok
from store.database import EVERYTHING, Database
from tests.stack import START_TIMEOUT_S, free_port


@pytest.fixture
def url(dsn: str, tmp_path: Path) -> Iterator[str]:
    port = free_port()
    settings = {
        "LORAPLEX_DATABASE_URL": dsn,
        "LORAPLEX_DATA_DIR": str(tmp_path),
        "LORAPLEX_KEY_PEPPER": "pepper",
        "LORAPLEX_PORT": str(port),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "loraplex", "admin"], env={**os.environ, **settings}
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        # If the database takes its time, another server answers /livez until then.
        while not answers_ok(url.removeprefix("http://"), "/readyz"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/livez")


async def test_it_administers_and_does_not_infer(url: str, dsn: str):
    database = await Database.connect(dsn, sees=EVERYTHING)
    async with database.transaction() as connection:
        _, key = await create_key(connection, b"pepper", None)
    await database.close()
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
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
