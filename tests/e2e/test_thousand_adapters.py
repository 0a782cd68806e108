"""A thousand adapters registered over REST, room for eight on the device and 64 in host memory:
each answers as itself, no bound is passed and nothing stays behind. The suite has sixty."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.doubles import write_adapter
from tests.e2e import demo
from tests.e2e.tiny import Tiny
from tests.oracle import Verdict
from tests.scale import scaled
from tests.stack import PLAIN, Stack, running
from tests.worker_state import watched_worker, worker_metrics
from workers.models.unnamed_ids import read_unnamed_ids
from workers.wire.status import WorkerStatus

pytestmark = pytest.mark.full

NUM_ADAPTERS = scaled(40, 1000)
NUM_REQUESTS = scaled(250, 10_000)
NUM_HOST_IMAGES = scaled(16, 64)
NUM_SLOTS = 8
NUM_TOKENS = 8
ARENA_BYTES = 4 << 20
IMAGE_BYTES = 118_784
"""Of rank 16 in float32."""
RSS_SLACK_BYTES = 48 << 20
"""What a process may have more at the end than after a tenth of the traffic. A thousand images
would be more."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For the oracle: two that wait for each other on busy cores are thirty times as slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.soak
@pytest.mark.usefixtures("one_thread")
@pytest.mark.timeout(scaled(300, 3600))
def test_a_thousand_adapters_answer_as_themselves(tiny: Tiny) -> None:
    rng = random.Random(3)
    folders = {
        f"a{i:04}": write_adapter(
            tiny.shape, tiny.folder / "adapters" / str(i), rank=16, seed=i, b_std=0.3
        )
        for i in range(NUM_ADAPTERS)
    }
    names = list(folders)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(4, 60))] for _ in range(40)]
    zipf = [1 / (rank + 1) for rank in range(NUM_ADAPTERS)]
    half = NUM_REQUESTS // 2
    chosen = rng.choices(names, zipf, k=half) + rng.choices(names, k=NUM_REQUESTS - half)
    asked = [(name, rng.choice(prompts)) for name in chosen]
    stack = tiny.stack(
        command=PLAIN,
        memory=ARENA_BYTES,
        max_loaded_adapters=NUM_SLOTS,
        host_adapter_memory=NUM_HOST_IMAGES * IMAGE_BYTES,
        max_num_seqs=16,
    )
    with running(stack):
        key = stack.create_tenant("acme")
        with (
            watched_worker(stack) as statuses,
            stack.openai(key, timeout=120) as client,
            ThreadPoolExecutor(24) as pool,
        ):
            started = time.monotonic()
            register(stack, folders, "acme")
            print(f"{NUM_ADAPTERS} adapters ready after {time.monotonic() - started:.1f} s")

            def ask(some: list[tuple[str, list[int]]]) -> list[list[int]]:
                return list(pool.map(lambda one: demo.complete(client, *one, NUM_TOKENS), some))

            started = time.monotonic()
            answers = ask(asked[: NUM_REQUESTS // 10])
            baseline = resident_bytes(stack)
            answers += ask(asked[NUM_REQUESTS // 10 :])
            print(f"{NUM_REQUESTS} requests in {time.monotonic() - started:.1f} s")
        metrics = at_rest(stack)
        for process, num_bytes in resident_bytes(stack).items():
            assert num_bytes < baseline[process] + RSS_SLACK_BYTES, (process, num_bytes, baseline)
    assert metrics["loraplex_adapter_evictions_total"] > NUM_ADAPTERS
    assert metrics["loraplex_adapter_leases"] == 0
    assert metrics["loraplex_integrity_failures_total"] == 0
    assert_bounds(statuses)
    judge(tiny.model, folders, asked, answers)


def register(stack: Stack, folders: dict[str, Path], tenant: str) -> None:
    """Returns when all are proved."""
    with stack.admin as admin, ThreadPoolExecutor(4) as pool:

        def push(name: str) -> None:
            files = {path.name: (path.name, path.read_bytes()) for path in folders[name].iterdir()}
            answer = admin.post("/adapters", data={"name": name, "tenant": tenant}, files=files)
            assert answer.status_code == 201, answer.text

        list(pool.map(push, folders))
        deadline = time.monotonic() + scaled(120, 900)
        while True:
            query = {"tenant": tenant, "limit": 1000}
            found = admin.get("/adapters", params=query).json()["data"]
            if [a["states"] for a in found] == [{"ready": 1}] * len(folders):
                return
            assert time.monotonic() < deadline, [a for a in found if a["states"] != {"ready": 1}]
            time.sleep(0.5)


def resident_bytes(stack: Stack) -> dict[str, int]:
    """Of the processes that hold adapters."""
    found: dict[str, int] = {}
    for process in psutil.Process(stack.pid).children():
        command = " ".join(process.cmdline())
        for role in ("worker_process", "loraplex gateway"):
            if role in command:
                found[role] = process.memory_info().rss
    assert len(found) == 2
    return found


def at_rest(stack: Stack) -> dict[str, float]:
    """The worker's metrics once nothing runs; pages then belong to the prefix cache or to
    nobody."""
    deadline = time.monotonic() + 60
    while True:
        metrics = worker_metrics(stack)
        busy = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
        if busy == 0 and metrics["vllm:kv_cache_usage_perc"] == 0:
            return metrics
        assert time.monotonic() < deadline, metrics


def assert_bounds(statuses: list[WorkerStatus]) -> None:
    """What the worker said of itself all the while."""
    assert len(statuses) > 3
    most: dict[str, int] = defaultdict(int)
    for status in statuses:
        num_weights = status.extents.count("w")
        extent_bytes = status.arena_bytes // len(status.extents)
        assert status.arena_bytes - num_weights * extent_bytes == ARENA_BYTES
        tiers = [(adapter.tier, adapter.num_bytes) for adapter in status.adapters]
        for tier in ("device", "host"):
            most[tier] = max(most[tier], sum(1 for one, _ in tiers if one == tier))
        host_bytes = sum(num_bytes for tier, num_bytes in tiers if tier == "host")
        assert host_bytes <= NUM_HOST_IMAGES * IMAGE_BYTES
        assert all(not adapter.error for adapter in status.adapters)
    assert 0 < most["device"] <= NUM_SLOTS
    assert NUM_HOST_IMAGES // 2 < most["host"] <= NUM_HOST_IMAGES


def judge(
    model: Path,
    folders: dict[str, Path],
    asked: list[tuple[str, list[int]]],
    answers: list[list[int]],
) -> None:
    """Each adapter alone in peft, all its answers in one batch. They differ in nothing but their
    weights, so one model of peft's is given one's after the other's."""
    of_adapter: dict[str, list[tuple[list[int], list[int]]]] = defaultdict(list)
    for (name, prompt), answer in zip(asked, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        of_adapter[name].append((prompt, answer))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    oracle = PeftModel.from_pretrained(base, str(next(iter(folders.values())))).eval()
    unnamed = read_unnamed_ids(model, base.config.vocab_size, [base.config.eos_token_id])
    verdict, fingerprints = Verdict(), []
    for name, some in of_adapter.items():
        weights = load_file(folders[name] / "adapter_model.safetensors")
        assert not set_peft_model_state_dict(oracle, weights).unexpected_keys
        rows = [[1, 2, 3], *(prompt + answer[:-1] for prompt, answer in some)]
        logits = forward(oracle, rows).clone()
        fingerprints.append(logits[0, 2].clone())
        logits[..., unnamed] = -torch.inf
        for row, (prompt, answer) in zip(logits[1:], some, strict=True):
            verdict.add(row[len(prompt) - 1 :], answer, name)
    assert verdict.num_tokens == NUM_REQUESTS * NUM_TOKENS
    verdict.assert_equal(max_ties=scaled(2, 10))
    scores = torch.stack(fingerprints)
    apart = torch.cdist(scores, scores, p=float("inf")).fill_diagonal_(1.0)
    assert float(apart.min()) > 1e-2


@torch.inference_mode()
def forward(oracle: PeftModel, rows: list[list[int]]) -> Tensor:
    """float32 [len(rows), longest, V]; what pads a row at its end changes nothing before it."""
    longest = max(map(len, rows))
    return oracle(torch.tensor([row + [0] * (longest - len(row)) for row in rows])).logits.float()
