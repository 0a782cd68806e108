"""A fresh database and a served admin plane for each test."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import httpx
import msgspec
import pytest
from litestar import Litestar

from adapters.store.folder import LocalStore
from admin.app import create_app
from admin.http.plane import AdminConfig, AdminPlane
from store.database import Database
from tests.adapters.files import BASE
from tests.admin.serve import PATH, PEPPER, admin_key, bearing
from tests.plane import Plane as Server

MAX_UPLOAD_BYTES = 1 << 20
CONFIG = AdminConfig(pepper=PEPPER, max_upload_bytes=MAX_UPLOAD_BYTES)


def write_model(store: Path, digest: str, **changes: int) -> None:
    """What the admin plane reads of a model: its config. The shape is that of BASE."""
    folder = store / "models" / digest
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "num_hidden_layers": BASE.num_layers,
        "hidden_size": BASE.hidden_size,
        "num_attention_heads": BASE.num_heads,
        "num_key_value_heads": BASE.num_kv_heads,
        "head_dim": BASE.head_dim,
        "intermediate_size": BASE.intermediate_size,
        "vocab_size": BASE.vocab_size,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))


class Plane(msgspec.Struct):
    """A running admin plane and its clients."""

    url: str
    database: Database
    """Sees everything; what the plane works with does not."""
    store: Path
    clients: list[httpx.AsyncClient] = []

    @property
    def client(self) -> httpx.AsyncClient:
        """Bears the admin key."""
        return self.clients[0]

    async def tenant(self, name: str, **key: object) -> httpx.AsyncClient:
        """A new tenant; a client with its key."""
        made = await self.client.post("tenants", json={"name": name})
        assert made.status_code == 201, made.text
        return self.bearing((await self.key(name, **key))["key"])

    async def key(self, tenant: str, **fields: object) -> dict[str, object]:
        answer = await self.client.post(f"tenants/{tenant}/keys", json=fields)
        assert answer.status_code == 201, answer.text
        return answer.json()

    def bearing(self, key: str) -> httpx.AsyncClient:
        client = bearing(self.url, key)
        self.clients.append(client)
        return client

    def files(self) -> set[str]:
        """Digests of the adapters in the store; asserts that nothing lies about."""
        assert list((self.store / "incoming").iterdir()) == []
        return {entry.name for entry in (self.store / "adapters").iterdir()}


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> Litestar:
    """Its routes take a fifth of a second to make, so each test only gives it a plane."""
    store = LocalStore(tmp_path_factory.mktemp("none"))
    return create_app(CONFIG, database=cast("Database", None), store=store)


@pytest.fixture
async def plane(
    app: Litestar, dsn: str, database: Database, tmp_path: Path
) -> AsyncIterator[Plane]:
    own = await Database.connect(dsn)
    store = tmp_path / "store"
    app.state.admin = AdminPlane(CONFIG, own, LocalStore(store))
    async with Server(app) as served:
        plane = Plane(served.url + PATH, database, store)
        plane.bearing(await admin_key(database))
        yield plane
        for client in plane.clients:
            await client.aclose()
    await app.state.admin.validation.close()
    await own.close()


@pytest.fixture
async def base(plane: Plane) -> str:
    """The digest of a registered base model, `tiny`, of the shape BASE."""
    write_model(plane.store, "b" * 64)
    answer = await plane.client.post("models", json={"name": "tiny", "digest": "b" * 64})
    assert answer.status_code == 201, answer.text
    return "b" * 64
