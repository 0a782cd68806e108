"""The product as a fleet: workers and gateways in processes of their own on one Postgres, each of
which a test may end, hold up, kill and start again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from adapters.format.validator import AdapterFiles
from admin.adapters import versions
from admin.adapters.versions import NewVersion
from admin.keys import keys
from admin.models import models
from admin.tenants import tenants
from store.database import EVERYTHING, Database
from store.records import TENANT_SCOPES
from tests.adapters.files import validate
from tests.e2e.fleet import WORKER, FleetSetup, Worker
from tests.e2e.tiny import MAX_MODEL_LEN, NAME
from tests.gateway.pepper import PEPPER
from tests.plane import START_TIMEOUT_S, Plane, product
from tests.postgres import fresh_database
from tests.waiting import eventually

TENANTS = ("acme", "globex")


@dataclass(frozen=True)
class Asked:
    """A request whose answer is the same whoever answers it."""

    prompt: tuple[int, ...]
    max_tokens: int
    model: str = NAME
    tenant: str = TENANTS[0]
    temperature: float = 0.0
    seed: int = 0
    regex: str | None = None
    """What the answer is held to."""

    @classmethod
    def draw(
        cls, rng: random.Random, models: Sequence[str], num_prompt: int, max_tokens: int
    ) -> Asked:
        """Greedy or sampled, with one of the models, of one of the tenants."""
        return cls(
            prompt=tuple(rng.randrange(256) for _ in range(num_prompt)),
            max_tokens=max_tokens,
            model=rng.choice(models),
            tenant=rng.choice(TENANTS),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(1 << 31),
        )


@dataclass
class Answer:
    """What a client was told."""

    worker: str
    """The first that got it."""
    request_id: str
    tokens: list[int] = field(default_factory=list[int])
    text: str = ""
    finish_reason: str | None = None
    """None: nobody said that it was the end."""

    def says(self, other: Answer) -> bool:
        """The same, to the same end."""
        mine, theirs = ((a.tokens, a.text, a.finish_reason) for a in (self, other))
        return mine == theirs


class Cluster:
    """The base model `tiny`, and adapters a000, a001, ... of each tenant."""

    def __init__(
        self, setup: FleetSetup, dsn: str, database: Database, tenants: Sequence[str] = TENANTS
    ) -> None:
        self.setup = setup
        self.dsn = dsn
        self.database = database
        self.tenants = tenants
        self.workers: dict[str, Worker] = {}
        self.gateways: dict[str, Plane] = {}
        self.keys: dict[str, str] = {}
        """By tenant."""
        self._clients: dict[tuple[str, str], AsyncOpenAI] = {}

    @property
    def processes(self) -> dict[str, Plane]:
        return {**self.workers, **self.gateways}

    def add_worker(self, name: str, module: str = WORKER, **settings: Any) -> Worker:
        """Not started yet. module: has its command."""
        self.workers[name] = self.setup.worker(name, module, **settings)
        return self.workers[name]

    def add_gateway(
        self, name: str, workers: Sequence[str], module: str = "loraplex", **settings: object
    ) -> Plane:
        """Not started yet. workers: the addresses where it finds them. module: has its command."""
        self.gateways[name] = self.product(
            "gateway", name, module, workers=",".join(workers), **settings
        )
        return self.gateways[name]

    def product(self, role: str, name: str, module: str = "loraplex", **settings: object) -> Plane:
        """Returns a plane over the cluster's database and store."""
        return product(
            role,
            folder=self.setup.folder / name,
            name=name,
            module=module,
            store=self.setup.folder / "store",
            database_url=self.dsn,
            key_pepper=PEPPER.decode(),
            **settings,
        )

    @property
    def num_moves(self) -> int:
        """Sequences that gateways sent to another worker than before, by their logs."""
        return sum(each.log_text.count(" moved to worker ") for each in self.gateways.values())

    def client(self, gateway: str, tenant: str = TENANTS[0]) -> AsyncOpenAI:
        """It tries once."""
        key = (gateway, tenant)
        if key not in self._clients:
            self._clients[key] = AsyncOpenAI(
                base_url=f"{self.gateways[gateway].url}/v1",
                api_key=self.keys[tenant],
                max_retries=0,
                timeout=120,
            )
        return self._clients[key]

    async def ask(
        self,
        gateway: str,
        asked: Asked,
        *,
        salt: str = "",
        on_token: Callable[[Answer], None] = lambda answer: None,
    ) -> Answer:
        """Streams; `on_token` is called with what has come so far. salt: nothing is cached that was
        not asked with the same. Raises openai.APIError."""
        return await stream(self.client(gateway, asked.tenant), asked, salt, on_token)

    async def prepare(self) -> None:
        """What its gateways find in the database; the adapters are not proved yet."""
        setup, shape = self.setup, self.setup.tiny.shape
        async with self.database.transaction() as connection:
            await models.register_model(connection, NAME, shape, setup.tiny.max_model_len)
            for name in self.tenants:
                tenant = await tenants.create_tenant(connection, name)
                scopes = TENANT_SCOPES
                _, self.keys[name] = await keys.create_key(connection, PEPPER, tenant.id, scopes)
                for adapter in setup.digests:
                    files = AdapterFiles.in_folder(setup.folder / "adapters" / adapter)
                    new = NewVersion(
                        tenant_id=tenant.id,
                        name=adapter,
                        base_name=NAME,
                        manifest=validate(files, shape),
                        wanted_alias="prod",
                    )
                    await versions.add_version(connection, new)

    async def serves_adapters(self) -> bool:
        """Every gateway that runs."""
        for gateway in self.gateways.values():
            if gateway.is_running:
                for tenant in self.tenants:
                    listed = await self.client(gateway.name, tenant).models.list()
                    if not self.setup.digests.keys() <= {model.id for model in listed.data}:
                        return False
        return True

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        for process in self.processes.values():
            await process.kill()


async def stream(
    client: AsyncOpenAI,
    asked: Asked,
    salt: str = "",
    on_token: Callable[[Answer], None] = lambda answer: None,
) -> Answer:
    chunks = await client.completions.create(
        model=asked.model,
        prompt=list(asked.prompt),
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        seed=asked.seed,
        stream=True,
        extra_body={
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt or None,
            "guided_regex": asked.regex,
        },
    )
    headers = chunks.response.headers
    answer = Answer(headers["loraplex-worker"], headers["x-request-id"])
    async for chunk in chunks:
        for choice in chunk.choices:
            answer.tokens += (choice.model_extra or {}).get("token_ids") or []
            answer.text += choice.text
            answer.finish_reason = choice.finish_reason or answer.finish_reason
        on_token(answer)
    return answer


@asynccontextmanager
async def running_cluster(
    folder: Path,
    *,
    num_workers: int,
    num_gateways: int,
    num_adapters: int = 2,
    tenants: Sequence[str] = TENANTS,
    worker: str = WORKER,
    gateway: str = "loraplex",
    reached_at: Callable[[str], str] = str,
    max_model_len: int = MAX_MODEL_LEN,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """worker-0, worker-1, ... and gateway-0, ..., all ready, each gateway with all workers and the
    adapters served. worker, gateway: the modules that have their commands. reached_at: where
    gateways are to find one that listens at an address. settings: of the workers."""
    async with AsyncExitStack() as stack:
        dsn = stack.enter_context(fresh_database())
        database = await Database.connect(dsn, sees=EVERYTHING)
        stack.push_async_callback(database.close)
        setup = FleetSetup(folder, num_adapters, max_model_len=max_model_len)
        cluster = Cluster(setup, dsn, database, tenants)
        stack.push_async_callback(cluster.close)
        await cluster.prepare()
        for number in range(num_workers):
            cluster.add_worker(f"worker-{number}", worker, **settings)
        addresses = [reached_at(worker.address) for worker in cluster.workers.values()]
        for number in range(num_gateways):
            cluster.add_gateway(f"gateway-{number}", addresses, gateway)
        await asyncio.gather(*(process.start() for process in cluster.processes.values()))
        await eventually(cluster.serves_adapters, START_TIMEOUT_S)
        yield cluster
