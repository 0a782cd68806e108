"""Two base models through the whole product, on a worker with room for one: streams of both at the
same time are never cut, and say what they say where nothing is swapped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from openai import OpenAI

from adapters.store import LocalStore
from tests.doubles import make_model
from tests.e2e.demo import gemma_gguf, gguf
from tests.scale import IS_FULL, scaled
from tests.stack import Stack, running
from tests.worker_state import worker_metrics
from workers.importer import import_model
from workers.models.plan import ModelPlan

NUM_STREAMS = scaled(16, 24)
NUM_TOKENS = scaled(200, 96)


class Pair:
    """Tiny random models in the suite, SmolLM2-135M and Gemma-3-270M in the full form."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        store = LocalStore(folder / "store")
        if IS_FULL:
            sources = {"smollm2": gguf(), "gemma3": gemma_gguf(folder)}
        else:
            sources = {n: make_model(folder / n, n) for n in ("llama", "gemma3_text")}
        self.folders = {
            name: store.model_folder(import_model(source, store))
            for name, source in sources.items()
        }
        plans = [ModelPlan.read(f, "", torch.float32) for f in self.folders.values()]
        self.sizes = sorted(plan.max_bytes(torch.float32) for plan in plans)

    def stack(self, name: str, **settings: object) -> Stack:
        arguments = [f"--model={name}={folder}" for name, folder in self.folders.items()]
        settings = {"store": self.folder / "store", "dtype": "float32", **settings}
        if not IS_FULL:
            settings["threads"] = 1
        return Stack(self.folder / name, *arguments, **settings)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield Pair(tmp_path_factory.mktemp("pair"))


def ask(client: OpenAI, model: str, prompt: list[int]) -> list[int]:
    """A greedy stream to its end; whatever cuts it raises."""
    tokens: list[int] = []
    finish_reason = None
    with client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    ) as stream:
        for chunk in stream:
            assert chunk.choices[0].model_extra is not None
            tokens += chunk.choices[0].model_extra["token_ids"] or []
            finish_reason = chunk.choices[0].finish_reason or finish_reason
    assert finish_reason == "length" and len(tokens) == NUM_TOKENS
    return tokens


def answers(stack: Stack, models: list[str]) -> list[list[int]]:
    """Of streams for one model and the other in turn, some at the same time."""
    rng = random.Random(5)
    prompts = [
        [rng.randrange(256) for _ in range(rng.randrange(4, 40))] for _ in range(NUM_STREAMS)
    ]
    with (
        stack.openai(stack.create_tenant("acme"), timeout=600) as client,
        ThreadPoolExecutor(6) as threads,
    ):
        asked = [
            threads.submit(ask, client, models[number % len(models)], prompt)
            for number, prompt in enumerate(prompts)
        ]
        return [each.result() for each in asked]


@pytest.mark.soak
def test_streams_survive_swaps_and_answers_are_the_same(pair: Pair) -> None:
    names = list(pair.folders)
    with running(pair.stack("roomy", memory=256 << 20)) as stack:
        expected = answers(stack, names)
        assert worker_metrics(stack)["loraplex_model_swaps_total"] == 2
    room = pair.sizes[1] + 3 * pair.sizes[0] // 4
    short = pair.stack("short", device_memory=room, max_model_wait_s=1.0, max_model_drain_s=0.2)
    with running(short) as stack:
        assert answers(stack, names) == expected
        metrics = worker_metrics(stack)
        assert metrics["loraplex_model_swaps_total"] >= 4
        assert metrics["loraplex_model_on_device"] == 1
        assert metrics["loraplex_integrity_failures_total"] == 0
