"""The end of a worker's process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.stack import ROOT
from tests.workers.process.test_worker import Setup
from workers.wire.client import WorkerClient


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
