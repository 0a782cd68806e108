"""`python -m benchmarks.proofs`: seconds until pushed adapters are proved, alone or beside streams.

A box serves SmolLM2-135M. Adapters of all projections are pushed in one command, which ends when
the last one is proved. `--streams` keeps that many streams of the base model going meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import httpx
from rich.console import Console

from adapters.store.folder import LocalStore
from benchmarks.machine import describe
from benchmarks.refresh import MODEL, TENANT, shape_of
from tests.doubles import write_adapter
from tests.e2e.demo import gguf
from tests.stack import Stack, running
from workers.importer import import_model

console = Console()


def keep_streaming(stack: Stack, key: str, stopped: threading.Event, tokens: list[int]) -> None:
    """Streams one answer after the other until `stopped`; adds the tokens of each to `tokens`."""
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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digest = import_model(gguf(), LocalStore(folder / "store"))
        shape = shape_of(folder / "store", digest)
        folders = [folder / f"bot-{number}" for number in range(options.adapters)]
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
            began = time.perf_counter()
            stack.cli("adapter", "push", *map(str, folders), "--tenant", TENANT)
            seconds = time.perf_counter() - began
            stopped.set()
            for stream in streams:
                stream.join()
    console.print(
        f"{options.adapters} adapters of rank {options.rank} beside {options.streams} streams:"
        f" {seconds:.1f} s, {tokens[0] / seconds:.1f} tokens/s meanwhile"
    )
    console.print(describe())


if __name__ == "__main__":
    main()
