"""Two hundred adapters, room for eight on the device: each answers as itself, and nothing stays
behind."""

from __future__ import annotations

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.doubles import write_adapter
from tests.e2e import demo
from tests.e2e.tiny import NAME, Tiny
from tests.oracle import Oracle, Verdict
from tests.stack import Stack, running
from tests.worker_state import worker_metrics

NUM_ADAPTERS = 200
NUM_REQUESTS = 400
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


def zipf(rng: random.Random, count: int, exponent: float = 1.0) -> int:
    weights = [1 / (rank + 1) ** exponent for rank in range(count)]
    return rng.choices(range(count), weights)[0]


def test_zipf_traffic_over_two_hundred_adapters(tiny: Tiny) -> None:
    rng = random.Random(3)
    folders = {
        f"a{i:03}": write_adapter(
            tiny.shape,
            tiny.folder / "adapters" / str(i),
            rank=rng.choice([2, 4, 8]),
            seed=i,
            b_std=0.5,
        )
        for i in range(NUM_ADAPTERS)
    }
    stack = tiny.stack(memory="4MiB", max_loaded_adapters=8, max_num_seqs=16)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(4, 60))] for _ in range(40)]
    names = list(folders)
    asked = [(names[zipf(rng, NUM_ADAPTERS)], rng.choice(prompts)) for _ in range(NUM_REQUESTS)]
    with running(stack):
        key = stack.create_tenant("acme")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: stack.push(folders[name], name, "acme"), names))
        with stack.openai(key, timeout=120) as client, ThreadPoolExecutor(24) as pool:
            answers = list(
                pool.map(
                    lambda one: demo.complete(client, one[0], one[1], NUM_TOKENS),
                    asked,
                )
            )
        metrics = at_rest(stack)
    assert metrics["loraplex_adapter_evictions_total"] > 0
    used = sorted({name for name, _ in asked})
    oracle = Oracle(tiny.model, {name: folders[name] for name in used})
    verdict = Verdict()
    for (name, prompt), answer in zip(asked, answers, strict=True):
        oracle.judge(verdict, prompt, answer, name, name)
    verdict.assert_equal()
    scores = torch.stack([oracle.logits(prompts[0], name)[-1] for name in used])
    for one, other in itertools.combinations(scores, 2):
        assert float((one - other).abs().max()) > 1e-2


def at_rest(stack: Stack) -> dict[str, float]:
    """The worker's metrics once nothing runs; pages then belong to the prefix cache or to
    nobody."""
    deadline = time.monotonic() + 10
    while True:
        metrics = worker_metrics(stack)
        busy = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
        if busy == 0 and metrics["vllm:kv_cache_usage_perc"] == 0:
            return metrics
        assert time.monotonic() < deadline, metrics
        time.sleep(0.2)


def test_closing_streams_frees_their_work(tiny: Tiny) -> None:
    """A hundred streams closed at random tokens: nothing runs, leases or holds pages a while
    later."""
    rng = random.Random(4)
    folders = {
        f"c{i}": write_adapter(tiny.shape, tiny.folder / "cancel" / str(i), rank=4, seed=i)
        for i in range(4)
    }
    stack = tiny.stack(memory="8MiB", max_num_seqs=32)

    def read_some(model: str) -> None:
        stream = client.completions.create(
            model=model,
            prompt=[rng.randrange(256) for _ in range(20)],
            max_tokens=400,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for _ in range(rng.randrange(1, 20)):
            next(stream)
        stream.close()

    with running(stack):
        key = stack.create_tenant("cancel")
        for name, folder in folders.items():
            stack.push(folder, name, "cancel")
        with stack.openai(key, timeout=60) as client, ThreadPoolExecutor(16) as pool:
            list(pool.map(read_some, [rng.choice([NAME, *folders]) for _ in range(100)]))
        metrics = at_rest(stack)
        assert metrics["loraplex_adapter_leases"] == 0
        with stack.openai(key, timeout=60) as client:
            answer = client.completions.create(model="c0", prompt=[1, 2, 3], max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
