"""`python -m benchmarks.proofs`: measures the time until pushed adapters are verified.

`loraplex serve` serves SmolLM2-135M. Adapters on all projections are pushed with one command, which
ends when the last adapter is verified. `--streams N` runs N streams of the base model at the same
time. The goal is for `--adapters 1000`, which needs 30 GB of disk for temporary files.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil
from rich.console import Console

from adapters.store.folder import LocalStore
from benchmarks.machine import describe
from benchmarks.refresh import MODEL, TENANT, shape_of
from tests.doubles import write_adapter
from tests.e2e.demo import gguf
from tests.stack import Stack, running
from workers.importer import import_model

GOAL_S = 0.6
"""Goal for the seconds per adapter, which is 1,000 adapters in ten minutes on two idle cores."""
BYTES_ON_DISK = 30 << 20
"""Bytes of an adapter of rank 16: its folder, its copy in the store and its packed image."""

console = Console()


def cpu_s(stack: Stack) -> tuple[float, float]:
    """Returns the CPU seconds that the whole machine and the product's processes have used since
    their start."""
    times, box_s = psutil.cpu_times(), 0.0
    root = psutil.Process(stack.pid)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            box_s += sum(process.cpu_times()[:4])
    return times.user + times.nice + times.system, box_s


def keep_streaming(stack: Stack, key: str, stopped: threading.Event, tokens: list[int]) -> None:
    """Streams one answer after the other until `stopped` is set. Adds the number of received tokens
    to `tokens[0]`."""
    headers = {"authorization": f"Bearer {key}"}
    asked = {"model": MODEL, "prompt": [100, 101, 102], "max_tokens": 256, "stream": True}
    with httpx.Client(base_url=f"{stack.url}/v1", headers=headers, timeout=300) as client:
        while not stopped.is_set():
            with client.stream("POST", "/completions", json=asked) as stream:
                for line in stream.iter_lines():
                    tokens[0] += line.startswith("data: {")
                    if stopped.is_set():
                        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=0)
    options = parser.parse_args()
    needed = options.adapters * options.rank // 16 * BYTES_ON_DISK
    if shutil.disk_usage(tempfile.gettempdir()).free < needed:
        parser.error(f"{tempfile.gettempdir()} needs {needed / 1e9:.1f} GB of free disk")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digest = import_model(gguf(), LocalStore(folder / "store"))
        shape = shape_of(folder / "store", digest)
        folders = [folder / f"bot-{number}" for number in range(options.adapters)]
        console.print(f"writing {options.adapters} folders")
        for number, path in enumerate(folders):
            write_adapter(shape, path, rank=options.rank, seed=number)
        model = f"{MODEL}={folder / 'store' / 'models' / digest}"
        with running(Stack(folder / "data", "--model", model, memory="1GiB")) as stack:
            key, stopped, tokens = stack.create_tenant(TENANT), threading.Event(), [0]
            arguments = (stack, key, stopped, tokens)
            streams = [
                threading.Thread(target=keep_streaming, args=arguments)
                for _ in range(options.streams)
            ]
            for stream in streams:
                stream.start()
            console.print("pushing them")
            began, before = time.perf_counter(), cpu_s(stack)
            stack.cli("adapter", "push", *map(str, folders), "--tenant", TENANT)
            seconds, after = time.perf_counter() - began, cpu_s(stack)
            stopped.set()
            for stream in streams:
                stream.join()
    console.print(
        f"{options.adapters} adapters of rank {options.rank} beside {options.streams} streams:"
        f" {seconds:.1f} s, {tokens[0] / seconds:.1f} tokens/s meanwhile"
    )
    machine_s, box_s = (
        (end - begin) / options.adapters for begin, end in zip(before, after, strict=True)
    )
    each_s = seconds / options.adapters
    console.print(f"{each_s:.3f} s each")
    if not options.streams:
        verdict = "met" if each_s <= GOAL_S else "missed"
        console.print(f"goal on two idle cores, {GOAL_S} s each: {verdict}")
    console.print(f"CPU of each: {box_s:.3f} s in the box, {machine_s:.3f} s on the whole machine")
    console.print(describe())


if __name__ == "__main__":
    main()
