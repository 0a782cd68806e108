"""`python -m benchmarks.refresh`: measures the time from the upload of an ephemeral version to its
first token.

`loraplex serve` serves SmolLM2-135M. Each round makes new weights of about 100 MB, uploads them
under the same name, and streams a completion of this adapter. With `--path`, the request names a
folder on the server instead of uploading files.

`make soak ARGS="tests/e2e/test_training_loop.py -s"` tests 500 refreshes under traffic. It also
checks memory and disk, and compares every answer with peft's.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table

from adapters.format.validator import CONFIG_NAME, WEIGHTS_NAME
from adapters.manifest import BaseModelShape
from adapters.store.folder import LocalStore
from benchmarks.machine import describe
from tests.doubles import write_adapter
from tests.e2e.demo import gguf
from tests.stack import Stack, running
from tests.worker_state import worker_page
from workers.importer import import_model
from workers.models.plan import ModelPlan

MODEL, NAME, TENANT = "smollm2-135m", "policy", "trainer"
PROMPT = list(range(100, 132))
STAGES = ("upload", "check", "publish", "pack", "copy", "compute", "rest")
"""Stages of a refresh. `compute` is the time to first token of a version that is already on the
device."""

console = Console()


def shape_of(store: Path, digest: str) -> BaseModelShape:
    plan = ModelPlan.read(store / "models" / digest, digest, torch.bfloat16)
    return plan.shape


def load_seconds(stack: Stack) -> dict[str, float]:
    """Returns the total seconds of all adapter loads since the worker started, by tier."""
    pattern = r'^loraplex_adapter_load_seconds_total\{[^}]*tier="(\w+)"[^}]*\} (\S+)$'
    return {m[1]: float(m[2]) for m in re.finditer(pattern, worker_page(stack), re.MULTILINE)}


def refresh(stack: Stack, client: httpx.Client, folder: Path, *, by_path: bool) -> dict[str, float]:
    """Loads a new version and requests tokens. Returns the seconds of each stage and in total."""
    before = load_seconds(stack)
    form = {"lora_name": NAME, "load_inplace": "true"}
    began = time.perf_counter()
    if by_path:
        body = {"lora_name": NAME, "lora_path": str(folder), "load_inplace": True}
        answer = client.post("/load_lora_adapter", json=body)
    else:
        files = {name: (name, (folder / name).read_bytes()) for name in (CONFIG_NAME, WEIGHTS_NAME)}
        answer = client.post("/load_lora_adapter", data=form, files=files)
    assert answer.status_code == 200, answer.text
    loaded = time.perf_counter()
    waited_s = first_token_s(client, PROMPT)
    ended = loaded + waited_s
    # Uses another prompt, of which no page is cached.
    compute_s = first_token_s(client, PROMPT[::-1])
    found = re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"])
    on_server = {name: float(text) / 1000 for name, text in found}
    time.sleep(1.0)
    after = load_seconds(stack)
    took = {tier: seconds - before.get(tier, 0.0) for tier, seconds in after.items()}
    stages = {
        "upload": loaded - began - on_server["check"] - on_server["publish"],
        "check": on_server["check"],
        "publish": on_server["publish"],
        "pack": took.get("store", 0.0) + took.get("disk", 0.0) + took.get("host", 0.0),
        "copy": took.get("device", 0.0),
        "compute": compute_s,
    }
    total = ended - began
    return stages | {"rest": total - sum(stages.values()), "total": total}


def first_token_s(client: httpx.Client, prompt: list[int]) -> float:
    asked = {"model": NAME, "prompt": prompt, "max_tokens": 2, "stream": True, "temperature": 0}
    began = time.perf_counter()
    with client.stream("POST", "/completions", json=asked) as stream:
        assert stream.status_code == 200, stream.read()
        next(line for line in stream.iter_lines() if line.startswith("data: "))
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rank", type=int, default=160)
    parser.add_argument("--path", action="store_true", help="name a folder, send no files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digest = import_model(gguf(), LocalStore(folder / "store"))
        checkpoint = folder / "checkpoint"
        settings: dict[str, Any] = {"adapter_roots": f"{TENANT}={folder}", "memory": "1GiB"}
        model = f"{MODEL}={folder / 'store' / 'models' / digest}"
        with running(Stack(folder / "data", "--model", model, **settings)) as stack:
            headers = {"authorization": f"Bearer {stack.create_tenant(TENANT)}"}
            rounds: list[dict[str, float]] = []
            with httpx.Client(base_url=f"{stack.url}/v1", headers=headers, timeout=120) as client:
                for number in range(options.rounds + 1):
                    shape = shape_of(folder / "store", digest)
                    write_adapter(shape, checkpoint, rank=options.rank, seed=number)
                    taken = refresh(stack, client, checkpoint, by_path=options.path)
                    console.print({stage: round(seconds, 3) for stage, seconds in taken.items()})
                    # The first round starts processes and warms caches.
                    rounds += [taken] if number else []
            report(rounds, (checkpoint / WEIGHTS_NAME).stat().st_size, options.path)


def report(rounds: list[dict[str, float]], num_bytes: int, by_path: bool) -> None:
    form = "path" if by_path else "inline"
    table = Table("stage", "median s", "min s", "max s", title=f"{num_bytes / 1e6:.1f} MB, {form}")
    for stage in (*STAGES, "total"):
        seconds = [taken[stage] for taken in rounds]
        shown = (statistics.median(seconds), min(seconds), max(seconds))
        table.add_row(stage, *(f"{each:.3f}" for each in shown))
    console.print(table)
    console.print(describe())


if __name__ == "__main__":
    main()
