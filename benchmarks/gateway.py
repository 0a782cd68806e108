"""`python -m benchmarks.gateway`: measures the time that the gateway adds to requests, first tokens
and streams.

`loraplex gateway` runs in its own process on the first core, with API keys, quotas, and a usage
ledger with a write-ahead log on disk. The load generator, a stub worker that sends real frames, and
Postgres run on the second core. Prompts are rendered and tokenised for an adapter of the demo
model. The number of tokens of every answer is checked."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import uvloop
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from adapters.manifest import AdapterManifest, BaseModelShape
from adapters.reference import AdapterRef
from adapters.store.folder import LocalStore
from admin.adapters import versions
from admin.adapters.versions import NewVersion
from admin.keys import keys
from admin.models import models
from admin.prices import prices
from admin.quotas import quotas
from admin.quotas.quotas import QuotaDetails
from admin.tenants import tenants
from benchmarks.frame_load import frame_streams
from benchmarks.frame_worker import LAYOUT, FrameWorker
from benchmarks.http_load import (
    Exchange,
    Request,
    StreamConnection,
    WholeConnection,
    closed_loop,
    connected,
    paced,
)
from benchmarks.machine import describe
from loraplex.roles.bootstrap import migrate_database
from store.database import EVERYTHING, Database
from store.records import TENANT_SCOPES, Price
from tests.e2e.demo import gguf
from tests.postgres import own_server
from web.server import bind
from workers.importer import import_model
from workers.wire.protocol import Generate, ModelInfo, SamplingParams

MODEL = "smollm2-135m-instruct"
ADAPTER = "support-bot"
PEPPER = "benchmark"
MAX_MODEL_LEN = 2048
LIMITS = QuotaDetails(
    "",
    requests_per_minute=10**7,
    tokens_per_minute=10**9,
    concurrent_requests=10**4,
    spend_per_month=10**18,
)
"""Limits that are never reached. The gateway still counts every request against them."""
LIMITS_OF_KEY = QuotaDetails("", tokens_per_day=10**12)
MESSAGES = [
    {"role": "system", "content": "You answer questions of customers, briefly."},
    {"role": "user", "content": "Hello! My order %d has not come yet. Where is it, and when?"},
]
"""Messages of each request. `%d` is replaced by a new number in every request."""
ANSWER = "Thank you for asking. Your order has left our house and comes within three days."
NUM_CONNECTIONS = 64
NUM_ROUNDS = 3
FIRST_TOKENS = {"first token": (16, 250.0), "... of longer answers": (64, 62.5)}
"""Tokens per answer, and requests per second, of the measurements of first tokens. On average, 40
connections are in use."""
NUM_STREAMS = 240
TOKENS_PER_S = 50
"""Tokens per second of each stream. All streams together have a fifth more than the gateway's goal
of 10,000 per second."""
FLOORS = {"raw": "raw socket", "asgi": "bare uvicorn", "litestar": "bare Litestar"}
START_TIMEOUT_S = 60.0

Rates = dict[str, "Requests"]
Times = dict[str, "Added"]

console = Console()


@dataclass
class Busy:
    """Shares of their cores that the server and the load generator use, from 0 to 1."""

    server: float
    generator: float


@dataclass
class Requests:
    """Measurement of unstreamed answers of 16 tokens, on 64 connections that never pause. Pairs of
    times are p50 and p99."""

    per_s: float
    latency_ms: tuple[float, float]
    busy: Busy

    @property
    def cpu_us(self) -> float:
        """Microseconds of the server's CPU time per request."""
        return self.busy.server / self.per_s * 1e6


@dataclass
class Added:
    """Times of streams through the gateway, and directly from the worker. Pairs are p50 and p99."""

    per_s: float
    """Requests or chunks per second."""
    gateway_ms: tuple[float, float]
    direct_ms: tuple[float, float]
    busy: Busy

    @property
    def cpu_us(self) -> float:
        """Microseconds of the server's CPU time per request or chunk."""
        return self.busy.server / self.per_s * 1e6

    @property
    def added_ms(self) -> tuple[float, float]:
        return (
            self.gateway_ms[0] - self.direct_ms[0],
            self.gateway_ms[1] - self.direct_ms[1],
        )


class Cores:
    """Cores of the server and of the load generator. On a machine with one core, both share it."""

    def __init__(self) -> None:
        available = sorted(os.sched_getaffinity(0))
        self.server = {available[0]}
        self.load = set(available[1:2]) or self.server

    def take(self) -> None:
        """Binds this process, and the processes that it starts later, to the load generator's
        core."""
        os.sched_setaffinity(0, self.load)

    @contextmanager
    def lent(self) -> Generator[None]:
        """Binds processes that are started in this context to the server's core."""
        os.sched_setaffinity(0, self.server)
        try:
            yield
        finally:
            os.sched_setaffinity(0, self.load)


SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while True:
    pass
"""


@contextmanager
def awake() -> Generator[None]:
    """Keeps all cores from halting in this context, with idle-priority processes. A halted core
    resumes slowly, especially on a virtual machine."""
    spinning = [
        subprocess.Popen([sys.executable, "-c", SPIN, str(core)])
        for core in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


class Shares:
    """Shares of their cores that the server and this process have used since this object was
    created."""

    def __init__(self, server: psutil.Process) -> None:
        self._server = server
        self._begun = self._now()

    def taken(self) -> Busy:
        server, own, wall = np.subtract(self._now(), self._begun)
        return Busy(float(server / wall), float(own / wall))

    def _now(self) -> tuple[float, float, float]:
        times = self._server.cpu_times()
        return times.user + times.system, time.process_time(), time.perf_counter()


class Bench:
    """Data directory with the demo model, and a database with a tenant and its adapter."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder = folder
        self.dsn = dsn
        store = LocalStore(folder / "store")
        digest = import_model(gguf(), store)
        model = store.model_folder(digest)
        config = json.loads((model / "config.json").read_text())
        self.shape = BaseModelShape.from_config(config, digest)
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.key = ""

    @property
    def worker(self) -> FrameWorker:
        info = ModelInfo(self.shape.digest, MODEL, MAX_MODEL_LEN, LAYOUT)
        return FrameWorker(info, self.tokenizer.encode(ANSWER).ids)

    async def prepare(self) -> None:
        await migrate_database(self.dsn)
        database = await Database.connect(self.dsn, sees=EVERYTHING, max_size=1)
        async with database.transaction() as connection:
            tenant = await tenants.create_tenant(connection, "acme")
            await models.register_model(connection, MODEL, self.shape, MAX_MODEL_LEN)
            key, self.key = await keys.create_key(
                connection, PEPPER.encode(), tenant.id, TENANT_SCOPES
            )
            await prices.set_price(connection, Price(MODEL, 100_000, 50_000, 400_000))
            for key_id, limits in ((None, LIMITS), (key.id, LIMITS_OF_KEY)):
                limits = msgspec.structs.replace(limits, subject=key_id or tenant.id)
                await quotas.set_quota(connection, tenant.id, key_id, limits)
            await versions.add_version(connection, new_version(tenant.id, self.shape.digest))
        await database.close()

    def chat(self, num_tokens: int, *, stream: bool) -> Request:
        body = json.dumps(
            {
                "model": ADAPTER,
                "messages": MESSAGES,
                "max_tokens": num_tokens,
                "temperature": 0.7,
                "stream": stream,
            }
        )
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Authorization: Bearer {self.key}\r\nContent-Type: application/json\r\n"
            f"User-Agent: benchmark\r\nAccept: */*\r\nContent-Length: {len(body % 10**7)}\r\n\r\n"
        )
        return Request((head + body).encode(), num_tokens)

    def generate(self, num_tokens: int) -> Generate:
        """Returns nearly the same worker request that the gateway makes of `chat`."""
        text = "\n".join(message["content"] for message in MESSAGES)
        return Generate(
            id=0,
            request_id="0" * 32,
            model=self.shape.digest,
            tokens=self.tokenizer.encode(text).ids,
            params=SamplingParams(num_tokens, seed=1, temperature=0.7),
            cache_domain="tenant:acme",
            adapter=AdapterRef("a" * 64, f"{ADAPTER}@1"),
        )


def new_version(tenant_id: str, base_digest: str) -> NewVersion:
    """Returns a version without weights, because the stub worker does not read weights."""
    manifest = AdapterManifest(
        digest="a" * 64,
        base_digest=base_digest,
        max_rank=8,
        num_parameters=1000,
        file_bytes=4000,
        projections=("q_proj",),
        layers=(0,),
    )
    return NewVersion(
        tenant_id=tenant_id, name=ADAPTER, base_name=MODEL, manifest=manifest, wanted_alias="prod"
    )


class Server:
    """Process on the server's core that listens on an inherited socket."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self.process = psutil.Process(process.pid)


@contextmanager
def started(
    command: Sequence[str], cores: Cores, log: Path, environment: dict[str, str] | None = None
) -> Generator[Server]:
    """Starts a server. `{fd}` in the command is replaced by the descriptor of the listening
    socket."""
    with bind("127.0.0.1", 0) as listener, log.open("wb") as output:
        fd = listener.fileno()
        with cores.lent():
            process = subprocess.Popen(
                [sys.executable, "-m", *(each.replace("{fd}", str(fd)) for each in command)],
                env={**os.environ, **(environment or {})},
                pass_fds=[fd],
                stdout=output,
                stderr=output,
            )
        port = listener.getsockname()[1]
    try:
        yield Server(port, process)
    finally:
        process.terminate()
        process.wait(30)


@asynccontextmanager
async def gateway(bench: Bench, worker: str, cores: Cores) -> AsyncGenerator[Server]:
    """Starts a gateway, and yields it as soon as it serves the adapter."""
    environment = {
        "LORAPLEX_DATA_DIR": str(bench.folder),
        "LORAPLEX_DATABASE_URL": bench.dsn,
        "LORAPLEX_KEY_PEPPER": PEPPER,
        "LORAPLEX_WORKERS": worker,
    }
    log = bench.folder / "gateway.log"
    command = ["loraplex", "gateway", "--fd", "{fd}"]
    with started(command, cores, log, environment) as server:
        url = f"http://127.0.0.1:{server.port}"
        headers = {"authorization": f"Bearer {bench.key}"}
        async with httpx.AsyncClient(base_url=url, headers=headers) as client:
            deadline = time.monotonic() + START_TIMEOUT_S
            body = {"model": ADAPTER, "messages": MESSAGES, "max_tokens": 3}
            while True:
                try:
                    if (await client.post("/v1/chat/completions", json=body)).is_success:
                        break
                except httpx.TransportError:
                    pass
                if time.monotonic() > deadline:
                    raise RuntimeError(log.read_text()[-4000:])
                await asyncio.sleep(0.1)
        yield server


async def measure_requests(request: Request, server: Server, seconds: float) -> Requests:
    async with connected(lambda: WholeConnection(request), server.port, NUM_CONNECTIONS) as senders:
        await closed_loop(senders, seconds / 4)
        shares = Shares(server.process)
        exchanges = await closed_loop(senders, seconds)
        busy = shares.taken()
    elapsed = max(e.ended_at for e in exchanges) - min(e.started_at for e in exchanges)
    times = [exchange.ended_at - exchange.started_at for exchange in exchanges]
    return Requests(len(exchanges) / elapsed, in_ms(times), busy)


async def measure_first_tokens(
    bench: Bench, server: Server, worker: str, num_tokens: int, rate: float, seconds: float
) -> Added:
    """Measures times to the first token in rounds, alternately through the gateway and directly at
    the worker, with the same random arrival times."""
    request = bench.chat(num_tokens, stream=True)
    through: list[Exchange] = []
    direct: list[Exchange] = []
    shares: list[Busy] = []

    def connection() -> StreamConnection:
        return StreamConnection(request)

    async with frame_streams(worker, bench.generate(num_tokens), NUM_CONNECTIONS) as streams:
        for number in range(1, NUM_ROUNDS + 1):
            # Each round reconnects, because the gateway may close connections that are idle during
            # a round of direct requests.
            async with connected(connection, server.port, NUM_CONNECTIONS) as senders:
                await paced(senders, rate, 1.0, seed=0)
                taken = Shares(server.process)
                through += await paced(senders, rate, seconds, seed=number)
                shares.append(taken.taken())
            direct += await paced(streams, rate, seconds, seed=number)
    busy = Busy(
        float(np.mean([each.server for each in shares])),
        float(np.mean([each.generator for each in shares])),
    )
    return Added(rate, in_ms(first_tokens(through)), in_ms(first_tokens(direct)), busy)


async def measure_chunks(bench: Bench, server: Server, worker: str, seconds: float) -> Added:
    """Measures times between chunks. All streams begin and advance at the same time, which is the
    worst case for a gateway."""
    num_tokens = round(TOKENS_PER_S * seconds)
    request = bench.chat(num_tokens, stream=True)
    async with connected(lambda: StreamConnection(request), server.port, NUM_STREAMS) as senders:
        shares = Shares(server.process)
        through = await closed_loop(senders, 0)
        busy = shares.taken()
    async with frame_streams(worker, bench.generate(num_tokens), NUM_STREAMS) as streams:
        direct = await closed_loop(streams, 0)
    arrivals = np.concatenate([exchange.arrivals for exchange in through])
    per_s = len(arrivals) / (arrivals.max() - arrivals.min())
    return Added(float(per_s), in_ms(gaps(through)), in_ms(gaps(direct)), busy)


async def measure_floors(
    bench: Bench, cores: Cores, body: str, seconds: float
) -> dict[str, Requests]:
    """Measures the same load on servers that send a fixed answer, as a lower bound."""
    floors: dict[str, Requests] = {}
    for kind, name in FLOORS.items():
        command = ["benchmarks.http_floors", kind, "{fd}", body]
        with started(command, cores, bench.folder / f"{kind}.log") as server:
            floors[name] = await measure_requests(bench.chat(16, stream=False), server, seconds)
    return floors


async def an_answer(bench: Bench, server: Server) -> str:
    body = {"model": ADAPTER, "messages": MESSAGES, "max_tokens": 16}
    headers = {"authorization": f"Bearer {bench.key}"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
    return answer.raise_for_status().text


def first_tokens(exchanges: Sequence[Exchange]) -> list[float]:
    return [exchange.arrivals[0] - exchange.started_at for exchange in exchanges]


def gaps(exchanges: Sequence[Exchange]) -> np.ndarray:
    """Returns the times between tokens, without the first second, in which all streams begin."""
    begin = min(exchange.started_at for exchange in exchanges) + 1.0
    arrivals = [np.asarray(exchange.arrivals) for exchange in exchanges]
    return np.concatenate([np.diff(each[each > begin]) for each in arrivals])


def in_ms(seconds: Sequence[float] | np.ndarray) -> tuple[float, float]:
    p50, p99 = np.percentile(np.asarray(seconds) * 1000, [50, 99])
    return float(p50), float(p99)


async def run(bench: Bench, cores: Cores, seconds: float) -> tuple[Rates, Times]:
    await bench.prepare()
    worker = bench.worker
    path = bench.folder / "worker.sock"
    async with worker.listening(path) as address, gateway(bench, address, cores) as server:
        # Garbage collection would delay the load generator, and the delay would be counted as time
        # of the gateway.
        gc.disable()
        answer = await an_answer(bench, server)
        worker.step_s = 0.001
        own = await measure_requests(bench.chat(16, stream=False), server, seconds)
        worker.step_s = 0.010
        firsts = {
            name: await measure_first_tokens(bench, server, str(path), *load, seconds / 2)
            for name, load in FIRST_TOKENS.items()
        }
        worker.step_s = 1 / TOKENS_PER_S
        chunks = await measure_chunks(bench, server, str(path), seconds)
    floors = await measure_floors(bench, cores, answer, seconds / 2)
    return {**floors, "gateway": own}, {**firsts, "between chunks": chunks}


def show(rates: Rates, times: Times) -> None:
    table = Table("requests", "a second", "p50 / p99, ms", "CPU each, us", "cores: server / load")
    for name, found in rates.items():
        table.add_row(
            name,
            f"{found.per_s:.0f}",
            "{:.1f} / {:.1f}".format(*found.latency_ms),
            f"{found.cpu_us:.0f}",
            percents(found.busy),
        )
    console.print(table)
    columns = ("through p50 / p99, ms", "direct", "added", "CPU each, us", "cores: server / load")
    table = Table("streams", "a second", *columns)
    for name, found in times.items():
        pairs = (found.gateway_ms, found.direct_ms, found.added_ms)
        shown = ["{:.2f} / {:.2f}".format(*pair) for pair in pairs]
        table.add_row(
            name, f"{found.per_s:.0f}", *shown, f"{found.cpu_us:.0f}", percents(found.busy)
        )
    console.print(table)


def percents(busy: Busy) -> str:
    return f"{busy.server:.0%} / {busy.generator:.0%}"


def as_document(rates: Rates, times: Times) -> dict[str, Any]:
    document: dict[str, Any] = {"machine": describe()}
    for name, found in rates.items():
        document[name] = {**asdict(found), "cpu_us": found.cpu_us}
    for name, found in times.items():
        document[name] = {**asdict(found), "cpu_us": found.cpu_us, "added_ms": found.added_ms}
    return document


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--awake", action="store_true", help="let no core halt meanwhile")
    parser.add_argument("--json", type=Path, help="write everything there too")
    arguments = parser.parse_args()
    console.print(describe())
    cores = Cores()
    with (
        awake() if arguments.awake else nullcontext(),
        tempfile.TemporaryDirectory(prefix="lpx-") as name,
    ):
        cores.take()
        folder = Path(name)
        with own_server() as postgres:
            bench = Bench(folder, postgres.dsn())
            rates, times = uvloop.run(run(bench, cores, arguments.seconds))
    show(rates, times)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_document(rates, times), indent=1))


if __name__ == "__main__":
    main()
