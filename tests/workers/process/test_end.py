"""The end of a worker's process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import cast

import pytest

from tests.preloaded import ROOT
from tests.workers.process.test_worker import Setup
from workers.__main__ import CannotListen, _serve
from workers.process.build import Worker
from workers.process.config import WorkerConfig
from workers.wire.client import WorkerClient
from workers.wire.protocol import ModelInfo


class EndingWorker:
    """A worker whose loop runs until it is stopped."""

    instance_id = "w"
    ring = None

    def __init__(self, listen: str) -> None:
        needed = {"models": {}, "store": "/none", "cache_dir": Path("/none")}
        self.config = WorkerConfig(**needed, listen=listen, health="127.0.0.1:0")  # pyright: ignore
        self.is_stopped, self.has_run, self.is_closed = Event(), Event(), Event()
        self.models: list[ModelInfo] = []

    def make_loop(self, deliver: object) -> EndingWorker:
        return self

    def run(self) -> None:
        assert self.is_stopped.wait(60)
        self.has_run.set()

    def stop(self) -> None:
        self.is_stopped.set()

    def close(self) -> None:
        self.is_closed.set()


async def test_where_it_cannot_listen_its_loop_ends_and_everything_is_closed(
    tmp_path: Path,
) -> None:
    worker, threshold = EndingWorker(f"unix:{tmp_path}/none/worker.sock"), gc.get_threshold()
    with ThreadPoolExecutor(1) as engine:
        try:
            with pytest.raises(CannotListen):
                await _serve(cast(Worker, worker), engine, None)
            assert worker.is_stopped.is_set() and worker.has_run.is_set()
            assert worker.is_closed.is_set()
        finally:
            worker.stop()
            gc.set_threshold(*threshold)


class FailingWorker(EndingWorker):
    """A worker whose loop fails as soon as it is to drain."""

    def post(self, connection: int, message: object) -> None:
        self.is_stopped.set()

    def run(self) -> None:
        super().run()
        raise RuntimeError("the device is lost")


async def test_a_loop_that_fails_ends_the_drain_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, threshold = tmp_path / "worker.sock", gc.get_threshold()
    worker = FailingWorker(f"unix:{path}")
    with ThreadPoolExecutor(1) as engine:
        try:
            serving = asyncio.create_task(_serve(cast(Worker, worker), engine, None))
            while not path.exists():
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(RuntimeError, match="the device is lost"):
                await asyncio.wait_for(serving, 30)
            assert worker.is_closed.is_set()
            assert "not drained" not in caplog.text, "that would be its time, which is left"
        finally:
            worker.stop()
            gc.set_threshold(*threshold)


@pytest.mark.full
async def test_it_does_not_wait_for_adapters_that_nobody_waits_for(tmp_path: Path) -> None:
    """The store is slow: each file is a pipe, where a load stands until somebody opens it too."""
    setup = Setup(tmp_path, "llama", {f"r{rank}": {"rank": rank} for rank in range(1, 6)})
    pipes = sorted((tmp_path / "store" / "adapters").glob("*/adapter_model.safetensors"))
    for pipe in pipes:
        pipe.unlink()
        os.mkfifo(pipe)
    health = tmp_path / "health.sock"
    config = setup.config(listen=f"unix:{tmp_path}/worker.sock", health=f"unix:{health}")
    (tmp_path / "worker.json").write_text(config.to_json())
    command = [sys.executable, "-m", "workers", str(tmp_path / "worker.json")]
    process = subprocess.Popen(command, cwd=ROOT)
    client = WorkerClient(config.listen, instance_id="test")
    running = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(150):
            while not client.is_ready:
                await asyncio.sleep(0.05)
            for ref in setup.refs.values():
                client.prefetch(setup.digest, ref)
            while client.status is None or len(client.status.adapters) < len(pipes):
                await asyncio.sleep(0.05)
            process.terminate()
            while health.exists():
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            opened: set[Path] = set()
            while process.poll() is None:
                for pipe in pipes:
                    with suppress(OSError):
                        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
                        opened.add(pipe)
                await asyncio.sleep(0.01)
    finally:
        process.kill()
        process.wait()
        running.cancel()
    # One was under way.
    assert process.returncode == 0 and len(opened) < len(pipes)
