"""`python -m benchmarks.swap`: measures the time to load a base model that replaces another one on
the device. Compares it with the time to read and write the model's bytes, and with the start of a
new process.

One worker without a gateway serves SmolLM2-135M and Gemma-3-270M, and has room for one of them.
Requests alternate between the two. `--store FOLDER` keeps the imported models for the next run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from adapters.store.folder import LocalStore
from benchmarks.machine import describe
from ops.registry import select
from tests.e2e.demo import gemma_gguf, gguf
from tests.handles import Handle
from workers.importer import import_model
from workers.models.checkpoint import weight_files
from workers.models.plan import ModelPlan
from workers.process.config import DType, WorkerConfig
from workers.wire.client import WorkerClient
from workers.wire.protocol import Generate, SamplingParams
from workers.wire.status import ModelStatus

KV_BYTES = 160 << 20
PROMPT = list(range(100, 132))

console = Console()


@dataclass
class Model:
    """Model with its measurements. `cold_s` and `warm_s` are seconds to the first token when the
    model is loaded for it, and when it is already on the device. `load_s` are the seconds of loads
    that the worker reports."""

    name: str
    digest: str
    plan: ModelPlan
    cold_s: list[float] = field(default_factory=list[float])
    warm_s: list[float] = field(default_factory=list[float])
    load_s: list[float] = field(default_factory=list[float])
    start_s: list[float] = field(default_factory=list[float])
    """Seconds from the start of a process that serves only this model to its first token."""
    num_bytes: int = 0
    """Bytes of the packed weights."""

    @property
    def file_bytes(self) -> int:
        return sum(path.stat().st_size for path in weight_files(self.plan.folder))


class Bench:
    def __init__(self, folder: Path, dtype: DType) -> None:
        self.folder = folder
        self.dtype: DType = dtype
        store = LocalStore(folder)
        sources = {"smollm2-135m": gguf(), "gemma3-270m": gemma_gguf(folder)}
        self.models: list[Model] = []
        for name, source in sources.items():
            known = folder / f"{name}.digest"
            if not known.exists():
                console.print(f"importing {name}")
                known.write_text(import_model(source, store))
            digest = known.read_text()
            plan = ModelPlan.read(store.model_folder(digest), digest, getattr(torch, dtype))
            self.models.append(Model(name, digest, plan))

    @contextlib.asynccontextmanager
    async def worker(self, models: list[Model]) -> AsyncIterator[WorkerClient]:
        """Starts a worker process with room for the largest of the models. Yields a client."""
        largest = max(model.plan.max_bytes(select("cpu")) for model in models)
        config = WorkerConfig(
            models={model.name: model.digest for model in models},
            store=str(self.folder),
            cache_dir=self.folder / "cache",
            listen=f"unix:{self.folder}/worker.sock",
            health=f"unix:{self.folder}/health.sock",
            dtype=self.dtype,
            memory=KV_BYTES,
            device_memory=largest + KV_BYTES,
            max_model_wait_s=0.01,
        )
        (self.folder / "worker.json").write_text(config.to_json())
        socket = self.folder / "worker.sock"
        socket.unlink(missing_ok=True)
        log = (self.folder / "worker.log").open("wb")
        command = [sys.executable, "-m", "workers", str(self.folder / "worker.json")]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        client = WorkerClient(config.listen, instance_id="swap")
        try:
            while not socket.exists():
                assert process.poll() is None, (self.folder / "worker.log").read_text()[-2000:]
                await asyncio.sleep(0.01)
            async with client.connect():
                yield client
        finally:
            process.terminate()
            process.wait(30)

    async def start_processes(self) -> None:
        for model in self.models:
            begin = time.perf_counter()
            async with self.worker([model]) as client:
                await first_token_s(client, model)
                model.start_s.append(time.perf_counter() - begin)

    async def swap(self, rounds: int) -> None:
        async with self.worker(self.models) as client:
            for _ in range(rounds):
                for model in self.models:
                    # Waits until the idle model may be unloaded, so that this time is not measured.
                    await asyncio.sleep(2.5)
                    model.cold_s.append(await first_token_s(client, model))
                    model.warm_s.append(await first_token_s(client, model))
                    status = await status_of(client, model)
                    model.load_s.append(status.load_s)
                    model.num_bytes = status.num_bytes


async def first_token_s(client: WorkerClient, model: Model) -> float:
    """Returns the seconds to the first token of a request whose prompt is not cached."""
    params = SamplingParams(1, 0, temperature=0.0, ignore_eos=True)
    salt = str(time.perf_counter())
    request = Generate(0, "", model.digest, PROMPT, params, cache_domain="bench", cache_salt=salt)
    begin = time.perf_counter()
    async for _ in Handle(client, request):
        pass
    return time.perf_counter() - begin


async def status_of(client: WorkerClient, model: Model) -> ModelStatus:
    """Returns the model's status from the worker's next report."""
    before = client.status
    while client.status is before or client.status is None:
        await asyncio.sleep(0.01)
    return next(status for status in client.status.models if status.digest == model.digest)


def copy_bandwidth(num_bytes: int = 256 << 20) -> float:
    """Returns the bytes per second that one thread reads and writes when it copies to newly
    allocated memory."""
    torch.set_num_threads(1)
    source = torch.ones(num_bytes // 4, dtype=torch.float32)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        source.clone()
        best = min(best, time.perf_counter() - begin)
    return 2 * num_bytes / best


def report(models: list[Model], bandwidth: float, dtype: str) -> None:
    console.print(f"{describe()}; {dtype}; one thread copies {bandwidth / 1e9:.1f} GB/s")
    table = Table()
    for column in ("", *(model.name for model in models)):
        table.add_column(column)

    def row(name: str, values: list[str]) -> None:
        table.add_row(name, *values)

    def seconds(samples: list[float]) -> str:
        return f"{np.median(samples):.2f} s ({min(samples):.2f} to {max(samples):.2f})"

    moved = [model.file_bytes + model.num_bytes for model in models]
    row("bytes read + written", [f"{n / 1e6:.0f} MB" for n in moved])
    row("at that bandwidth", [f"{n / bandwidth:.2f} s" for n in moved])
    row("load", [seconds(model.load_s) for model in models])
    row(
        "load / at bandwidth",
        [f"{np.median(m.load_s) * bandwidth / n:.2f}" for m, n in zip(models, moved, strict=True)],
    )
    row("first token, swapped in", [seconds(model.cold_s) for model in models])
    row("first token, on the device", [seconds(model.warm_s) for model in models])
    row("first token, new process", [seconds(model.start_s) for model in models])
    console.print(table)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.store
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(folder, arguments.dtype)
        await bench.swap(arguments.rounds)
        for _ in range(3):
            await bench.start_processes()
        report(bench.models, copy_bandwidth(), arguments.dtype)


if __name__ == "__main__":
    asyncio.run(main())
