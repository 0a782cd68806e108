"""Runs one worker process as `loraplex serve` starts it, but without a gateway. Requests are sent
over the worker's socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import torch

from adapters.format.module_list import write_module_list
from adapters.format.validator import AdapterFiles, Limits, validate_and_list
from adapters.manifest import BaseModelShape
from adapters.pool.image import ImageCache
from adapters.pool.loader import AdapterLoader
from adapters.pool.packed_image import AdapterImage
from adapters.reference import AdapterRef
from adapters.store.folder import LocalStore
from ops.registry import select
from tests.doubles import write_adapter
from tests.e2e.demo import gguf
from tests.handles import Handle
from workers.importer import import_model
from workers.process.config import WorkerConfig
from workers.wire.client import WorkerClient
from workers.wire.protocol import Generate, SamplingParams

RANK = 8


@dataclass
class Stream:
    """Times of one answer, in seconds of the client's clock."""

    start_s: float
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.start_s


class House:
    """Store with the demo model and adapters of rank 8. All adapters are packed in the disk
    cache."""

    def __init__(self, folder: Path, num_adapters: int, threads: int | None) -> None:
        self.folder = folder
        self.threads = threads
        store = LocalStore(folder / "store")
        self.model = import_model(gguf(), store)
        config = json.loads((store.model_folder(self.model) / "config.json").read_text())
        self.shape = BaseModelShape.from_config(config, self.model)
        cache = ImageCache(folder / "cache", 64 << 30)
        loader = AdapterLoader(store, self.shape, torch.bfloat16, select("cpu"), cache)
        self.refs: list[AdapterRef] = []
        for seed in range(num_adapters):
            staged = store.stage()
            write_adapter(self.shape, staged, rank=RANK, seed=seed)
            validated = validate_and_list(AdapterFiles.in_folder(staged), [self.shape], Limits())
            write_module_list(staged, validated.modules)
            digest = validated.manifest.digest
            store.put("adapters", digest, staged)
            self.image = loader.fetch(digest)
            self.refs.append(AdapterRef(digest, str(seed)))
        self.copy_s = _copy_seconds(self.image)

    @property
    def image_bytes(self) -> int:
        return self.image.num_bytes

    @contextlib.asynccontextmanager
    async def worker(self, *, room: int, host: int) -> AsyncIterator[Worker]:
        """Starts a worker with room for `room` adapters on the device, `host` adapters in host
        memory, and 512 MiB of KV cache."""
        config = WorkerConfig(
            models={"demo": self.model},
            store=str(self.folder / "store"),
            cache_dir=self.folder / "cache",
            listen=f"unix:{self.folder}/worker.sock",
            health=f"unix:{self.folder}/health.sock",
            memory=(512 << 20) + (room + 2) * (self.image_bytes + (1 << 20)),
            adapter_memory_min=room * (self.image_bytes + (64 << 10)),
            host_adapter_memory=(host + 2) * self.image_bytes,
            max_loaded_adapters=room,
            max_num_seqs=64,
            threads=self.threads,
        )
        (self.folder / "worker.json").write_text(config.to_json())
        log = (self.folder / "worker.log").open("wb")
        command = [sys.executable, "-m", "workers", str(self.folder / "worker.json")]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        client = WorkerClient(config.listen, instance_id="residency")
        async with asyncio.TaskGroup() as tasks:
            try:
                while not (self.folder / "worker.sock").exists():
                    assert process.poll() is None, (self.folder / "worker.log").read_text()[-2000:]
                    await asyncio.sleep(0.1)
                running = tasks.create_task(client.run())
                while not (client.is_ready and client.status):
                    await asyncio.sleep(0.1)
                yield Worker(self, client)
                running.cancel()
            finally:
                process.terminate()
                process.wait(30)


class Worker:
    """Client of one worker."""

    def __init__(self, house: House, client: WorkerClient) -> None:
        self.house = house
        self.client = client
        self.rng = random.Random(1)

    async def ask(
        self, ref: AdapterRef, num_prompt: int, num_output: int, grammar: str = ""
    ) -> Stream:
        """Sends a request with a new random prompt, so that no cached prefix is used, and waits for
        its answer. `grammar` constrains the answer, in the form of the wire protocol."""
        vocab_size = self.house.shape.vocab_size
        prompt = [self.rng.randrange(100, vocab_size) for _ in range(num_prompt)]
        params = SamplingParams(num_output, 0, temperature=0.0, ignore_eos=True)
        request = Generate(
            0,
            "",
            self.house.model,
            prompt,
            params,
            cache_domain="bench",
            adapter=ref,
            grammar=grammar,
        )
        stream = Stream(time.perf_counter())
        async for output in Handle(self.client, request):
            stream.arrivals_s += [time.perf_counter()] * len(output.tokens)
        return stream

    async def closed_loop(
        self, choose: Callable[[], AdapterRef], count: int, concurrency: int, num_output: int
    ) -> float:
        """Sends `count` requests with prompts of 32 tokens, `concurrency` at a time. Returns the
        output tokens per second."""
        left = iter(range(count))
        begin = time.perf_counter()

        async def one_client() -> None:
            for _ in left:
                await self.ask(choose(), 32, num_output)

        await asyncio.gather(*(one_client() for _ in range(concurrency)))
        return count * num_output / (time.perf_counter() - begin)

    async def bring_to_host(self, refs: list[AdapterRef]) -> None:
        for ref in refs:
            self.client.prefetch(self.house.model, ref)
        wanted = {ref.digest for ref in refs}
        while not wanted <= {d for d, tier in self.tiers().items() if tier in ("host", "device")}:
            await asyncio.sleep(0.2)

    def tiers(self) -> dict[str, str]:
        status = self.client.status
        return {a.digest: a.tier for a in status.adapters} if status else {}

    def steps(self) -> np.ndarray:
        """Returns the microseconds of each of the worker's last steps."""
        transport = httpx.HTTPTransport(uds=str(self.house.folder / "health.sock"))
        with httpx.Client(transport=transport) as client:
            columns = client.get("http://worker/steps").json()
        return np.sum([np.array(columns[name]) for name in columns if name.endswith("_us")], axis=0)


def _copy_seconds(image: AdapterImage) -> float:
    """Returns the median seconds to copy an image into memory that is already mapped."""
    target = torch.zeros(image.num_bytes, dtype=torch.uint8)
    times: list[float] = []
    for _ in range(9):
        begin = time.perf_counter()
        target.copy_(torch.from_numpy(image.payload))
        times.append(time.perf_counter() - begin)
    return float(np.median(times))
