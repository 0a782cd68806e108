"""Several real workers behind one real gateway over HTTP; the catalog is made up, so that no
database is needed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from openai import AsyncOpenAI

from adapters.store.folder import LocalStore
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.run import Work
from gateway.requests.services import Gateway
from gateway.tracing import Tracing
from store.records import Alias, BaseModel, CatalogSnapshot, ServedVersion, Tenant
from tests.doubles import make_model, write_adapter
from tests.e2e.tiny import MAX_MODEL_LEN, NAME, Tiny
from tests.gateway.pepper import PEPPER
from tests.gateway.service import THEN, FedSource, Keys
from tests.plane import Plane
from tests.stack import MAX_QUEUE_WAIT_S
from tests.waiting import eventually
from tests.workers.driver import store_adapter
from workers.importer import import_model
from workers.process.config import WorkerConfig
from workers.wire.client import WorkerClient
from workers.wire.status import WorkerStatus

WORKER = "loraplex.roles.worker_process"
"""The module that runs one."""


class Worker(Plane):
    def __init__(self, name: str, config: WorkerConfig, folder: Path, module: str) -> None:
        """folder: of its config and log. module: whose command it is."""
        self.address = config.listen
        file = folder / "worker.json"
        file.write_text(config.to_json())
        super().__init__(
            (module, str(file), name),
            kind="forked",
            name=name,
            health=config.health,
            log=folder / "log",
        )


class FleetSetup:
    """A store with the tiny model, others like it, and adapters of rank 8 for it, all of acme."""

    def __init__(
        self,
        folder: Path,
        num_adapters: int,
        other_models: Sequence[str] = (),
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        self.folder = folder
        self.tiny = Tiny(folder, max_model_len=max_model_len)
        store = LocalStore(folder / "store")
        self.models = {NAME: self.tiny.shape}
        """By name."""
        for seed, name in enumerate(other_models, 1):
            digest = import_model(make_model(folder / name, "llama", seed=seed), store)
            self.models[name] = msgspec.structs.replace(self.tiny.shape, digest=digest)
        self.digests: dict[str, str] = {}
        """By name."""
        for seed in range(num_adapters):
            name = f"a{seed:03}"
            files = write_adapter(self.tiny.shape, folder / "adapters" / name, rank=8, seed=seed)
            self.digests[name] = store_adapter(store, files, self.tiny.shape).digest

    @asynccontextmanager
    async def plane(
        self, num_workers: int, *, tracing: Tracing | None = None, **settings: Any
    ) -> AsyncIterator[FleetPlane]:
        """settings: of the workers."""
        async with AsyncExitStack() as stack:
            workers = [self.worker(f"worker-{i}", **settings) for i in range(num_workers)]
            for worker in workers:
                stack.push_async_callback(worker.kill)
            await asyncio.gather(*(worker.start() for worker in workers))
            keys = Keys()
            app = create_app(
                GatewayConfig(
                    model_folder=(self.folder / "store" / "models").joinpath,
                    pepper=PEPPER,
                    wal=self.folder / "spool",
                    tracing=tracing or Tracing(),
                ),
                source=FedSource(self._catalog(keys)),
                clients=[WorkerClient(worker.address) for worker in workers],
            )
            plane = await stack.enter_async_context(FleetPlane(app, self.digests, workers))
            plane.client = AsyncOpenAI(base_url=f"{plane.url}/v1", api_key=keys.acme, max_retries=0)
            await stack.enter_async_context(plane.client)
            await eventually(lambda: len(plane.statuses) == num_workers)
            yield plane

    def worker(self, name: str, module: str = WORKER, **settings: Any) -> Worker:
        """Of all models, with one kernel thread; not started yet. module: whose command it is."""
        folder = self.folder / name
        folder.mkdir()
        config = WorkerConfig(
            store=str(self.folder / "store"),
            cache_dir=folder / "cache",
            listen=f"unix:{folder}/socket",
            health=f"unix:{folder}/health",
            dtype="float32",
            threads=1,
            **{
                "models": {name: shape.digest for name, shape in self.models.items()},
                "memory": 8 << 20,
                "max_num_seqs": 8,
                "max_queue_wait": MAX_QUEUE_WAIT_S,
                **settings,
            },
        )
        return Worker(name, config, folder, module)

    def _catalog(self, keys: Keys) -> CatalogSnapshot:
        return CatalogSnapshot(
            generation=1,
            tenants=(Tenant(id="ten_acme", name="acme"),),
            keys=tuple(keys.records),
            models=tuple(
                BaseModel(name, shape.digest, shape, MAX_MODEL_LEN, THEN)
                for name, shape in self.models.items()
            ),
            versions=tuple(
                ServedVersion("ten_acme", 1, THEN, digest, NAME, name=name)
                for name, digest in self.digests.items()
            ),
            aliases=tuple(Alias("ten_acme", name, "prod", 1) for name in self.digests),
        )


@dataclass(frozen=True)
class Answer:
    ttft_s: float
    num_prompt: int
    num_cached: int


class FleetPlane(Plane):
    def __init__(self, app: Any, digests: dict[str, str], workers: Sequence[Worker]) -> None:
        """digests: of the adapters, by name."""
        super().__init__(app)
        self.gateway: Gateway = app.gateway
        self.client: AsyncOpenAI
        self.digests = digests
        self.workers = {worker.name: worker for worker in workers}

    @property
    def statuses(self) -> list[WorkerStatus]:
        """Of the workers that have told of themselves."""
        return [s for s in (client.status for client in self.gateway.fleet.clients) if s]

    def holders(self, digest: str) -> int:
        """Workers that have the adapter on the device."""
        adapters = (a for status in self.statuses for a in status.adapters)
        return sum(a.digest == digest and a.tier == "device" for a in adapters)

    def holders_of(self, model: str) -> list[str]:
        """Names of the workers that have the base model on the device."""
        return [
            name
            for name, status in zip(self.workers, self.statuses, strict=True)
            if any(each.name == model and each.tier == "device" for each in status.models)
        ]

    @property
    def num_adapter_loads(self) -> int:
        """Onto the device, as of the last statuses."""
        gone = sum(model.num_adapter_evictions for s in self.statuses for model in s.models)
        return gone + sum(a.tier == "device" for s in self.statuses for a in s.adapters)

    async def ask(self, model: str, prompt: list[int], max_tokens: int) -> Answer:
        now = asyncio.get_running_loop().time
        begin, ttft_s = now(), 0.0
        stream = await self.client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        usage = None
        async for chunk in stream:
            ttft_s = ttft_s or now() - begin
            usage = chunk.usage or usage
        assert usage is not None and usage.completion_tokens == max_tokens
        details = usage.prompt_tokens_details
        num_cached = details.cached_tokens if details and details.cached_tokens else 0
        return Answer(ttft_s, usage.prompt_tokens, num_cached)

    async def ask_many(
        self, choose: Callable[[], tuple[str, list[int]]], count: int, concurrency: int
    ) -> list[Answer]:
        """So many at a time. They are drawn in one order, whatever order they end in."""
        asked = [choose() for _ in range(count)]
        left, answers = iter(asked), list[Answer]()

        async def one_client() -> None:
            for model, prompt in left:
                answers.append(await self.ask(model, prompt, 8))

        await asyncio.gather(*(one_client() for _ in range(concurrency)))
        return answers

    async def told(self) -> None:
        """All workers have sent another status."""
        before = self.statuses
        async with asyncio.timeout(60):
            while any(status is old for status, old in zip(self.statuses, before, strict=True)):
                await asyncio.sleep(0.05)


class RoundRobin(Fleet):
    """What the product does not offer."""

    def __init__(self, clients: Sequence[WorkerClient]) -> None:
        super().__init__(clients)
        self._turns = itertools.count()

    def choose(self, work: Work, excluded: Collection[WorkerClient] = ()) -> WorkerClient:
        able = self.serving(work.model)
        return able[next(self._turns) % len(able)]
