"""A gateway for tests: real uvicorn with uvloop on a free port, in a thread, over a fed catalog."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import openai
import uvloop

from adapters.manifest import BaseModelShape
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.requests.services import Gateway
from store.records import (
    Alias,
    ApiKey,
    BaseModel,
    CatalogSnapshot,
    ServedVersion,
    Tenant,
    hash_key,
    new_key,
)
from tests.doubles import SIZES, make_tokenizer
from tests.gateway.pepper import PEPPER
from tests.plane import Plane, free_port
from tests.scripted_worker import DIGEST, MAX_MODEL_LEN, ScriptedWorker
from tests.waiting import until
from web.held_bytes import SLOW_CLIENT_S, AnswerBudget

T = TypeVar("T")

OTHER_DIGEST = "e" * 64
THEN = datetime(2026, 1, 1, tzinfo=UTC)


class Keys:
    """One key of each kind, as text and as record."""

    def __init__(self) -> None:
        self.records: list[ApiKey] = []
        self.acme = self._issue("ten_acme", {"inference"})
        self.globex = self._issue("ten_globex", {"inference", "adapters:write"})
        self.admin = self._issue(None, {"admin"})
        self.uploader = self._issue("ten_acme", {"adapters:write"})
        self.expired = self._issue("ten_acme", {"inference"}, expires_at=THEN)
        self.revoked = self._issue("ten_acme", {"inference"}, revoked_at=THEN)
        self.unissued = new_key().text

    def _issue(self, tenant: str | None, scopes: set[str], **fields: Any) -> str:
        key = new_key()
        self.records.append(
            ApiKey(
                id=key.id,
                tenant_id=tenant,
                hash=hash_key(key.text, PEPPER),
                scopes=frozenset(scopes),
                **fields,
            )
        )
        return key.text


def snapshot(
    keys: Sequence[ApiKey],
    *,
    generation: int = 1,
    prod: int = 7,
    max_model_len: int = MAX_MODEL_LEN,
) -> CatalogSnapshot:
    """Two tenants who both have a `support-bot`; acme's has versions 3 and 7, globex' version 1."""
    shape = BaseModelShape.from_config({**SIZES, "model_type": "llama"}, DIGEST)

    def version(tenant: str, name: str, number: int) -> ServedVersion:
        return ServedVersion(
            tenant_id=tenant,
            name=name,
            version=number,
            created_at=THEN + timedelta(days=number),
            digest=f"{tenant}-{name}-{number}",
            base_name="tiny",
        )

    return CatalogSnapshot(
        generation=generation,
        tenants=(
            Tenant(id="ten_acme", name="acme"),
            Tenant(id="ten_globex", name="globex", sharing_group="family"),
        ),
        keys=tuple(keys),
        models=(
            BaseModel("tiny", DIGEST, shape, max_model_len, THEN),
            BaseModel("elsewhere", OTHER_DIGEST, shape, max_model_len, THEN),
        ),
        versions=(
            version("ten_acme", "support-bot", 3),
            version("ten_acme", "support-bot", 7),
            version("ten_globex", "support-bot", 1),
            version("ten_globex", "secret", 1),
        ),
        aliases=(
            Alias("ten_acme", "support-bot", "prod", prod),
            Alias("ten_acme", "support-bot", "staging", 3),
            Alias("ten_globex", "support-bot", "prod", 1),
            Alias("ten_globex", "secret", "prod", 1),
        ),
    )


class FedSource:
    """Yields what the test gives it."""

    def __init__(self, first: CatalogSnapshot) -> None:
        self._queue: asyncio.Queue[CatalogSnapshot] = asyncio.Queue()
        self._newest = first.generation
        self._queue.put_nowait(first)

    @property
    def unconfirmed_s(self) -> float:
        return 0.0

    async def generation(self) -> int:
        return self._newest

    def feed(self, snapshot: CatalogSnapshot) -> None:
        self._newest = snapshot.generation
        self._queue.put_nowait(snapshot)

    async def snapshots(self) -> AsyncIterator[CatalogSnapshot]:
        while True:
            yield await self._queue.get()


def make_store(folder: Path) -> Path:
    """A store with the tiny tokenizer under both digests."""
    for digest in (DIGEST, OTHER_DIGEST):
        model = folder / digest
        model.mkdir()
        make_tokenizer(model)
    return folder


class Service:
    """A running gateway and its workers, all in the loop of a thread."""

    def __init__(
        self,
        store: Path,
        num_workers: int = 1,
        slow_client_s: float = SLOW_CLIENT_S,
        send_buffer: int | None = None,
        **config: Any,
    ) -> None:
        self.keys = Keys()
        self.answers = AnswerBudget()
        self._bounds = {"slow_client_s": slow_client_s, "send_buffer": send_buffer}
        self._wal = tempfile.TemporaryDirectory(prefix="lpx-")
        self.config = GatewayConfig(
            model_folder=store.joinpath,
            pepper=PEPPER,
            wal=Path(self._wal.name),
            **{"failover_wait_s": 0.3, **config},
        )
        self.loop = uvloop.new_event_loop()
        self.worker = ScriptedWorker(reports=False)
        self.workers = [self.worker]
        self.workers += [
            ScriptedWorker(instance_id=f"scripted-{chr(97 + i)}", reports=False)
            for i in range(1, num_workers)
        ]
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.gateway: Gateway
        self.source: FedSource
        self._plane: Plane
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self.wait_for(lambda: hasattr(self, "_plane") and self._plane.is_serving)
        self.wait_for(lambda: self.gateway.why_not_ready() is None)

    def stop(self) -> None:
        self._plane.server.should_exit = True
        self._thread.join(timeout=60)
        self._wal.cleanup()
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Posts the body with acme's key."""
        headers = {"authorization": f"Bearer {self.keys.acme}", **headers}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=60)

    def feed(self, snapshot: CatalogSnapshot) -> None:
        """Returns when the gateway serves this catalog."""
        self.call(lambda: self.source.feed(snapshot))
        self.wait_for(lambda: self.gateway.catalog.current.generation == snapshot.generation)

    def client(self, key: str | None = None, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key or self.keys.acme,
            **{"max_retries": 0, "timeout": 20, **options},
        )

    def call(self, function: Callable[[], T]) -> T:
        """Runs the function in the gateway's loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout=60)

    def await_in_loop(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(function(), self.loop).result(timeout=60)

    wait_for = staticmethod(until)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.source = FedSource(snapshot(self.keys.records))
        clients = [client for worker in self.workers for client in await worker.clients()]
        app = create_app(self.config, source=self.source, clients=clients)
        self.gateway = app.gateway
        self._plane = Plane(app, port=self.port, answers=self.answers, **self._bounds)
        await self._plane.launch()
        await self._plane.wait()
        for worker in self.workers:
            await worker.close()
