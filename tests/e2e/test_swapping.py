"""Two base models through the whole product, on a worker with room for one: streams of both at the
same time are never cut, and say what they say where nothing is swapped."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from openai import OpenAI

from loraplex.box.importing import import_model
from loraplex.settings import Settings
from ops.registry import select
from tests.doubles import make_model
from tests.e2e.demo import gemma_gguf, gguf
from tests.scale import IS_FULL, scaled
from tests.stack import Stack, running
from tests.worker_state import worker_metrics
from workers.models.plan import ModelPlan

pytestmark = pytest.mark.full

NUM_STREAMS = scaled(16, 24)
NUM_TOKENS = scaled(200, 96)
WORDS = "([a-z]{3} ){500}"
"""Longer than an answer may be."""


class Pair:
    """Tiny random models in the suite, SmolLM2-135M and Gemma-3-270M in the full form."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if IS_FULL:
            self.sources = {"smollm2": gguf(), "gemma3": gemma_gguf(folder)}
        else:
            self.sources = {n: make_model(folder / n, n) for n in ("llama", "gemma3_text")}
        # Imported here, for it may take longer than a server that starts is waited for.
        settings = Settings(data_dir=folder / "data")
        store = settings.open_store()
        digests = [import_model(path, settings, lambda *_: None) for path in self.sources.values()]
        plans = [ModelPlan.read(store.model_folder(d), d, torch.float32) for d in digests]
        self.sizes = sorted(plan.max_bytes(select("cpu")) for plan in plans)

    def stack(self, **settings: object) -> Stack:
        arguments = [f"--model={name}={path}" for name, path in self.sources.items()]
        settings = {"dtype": "float32", **settings}
        if not IS_FULL:
            settings["threads"] = 1
        return Stack(self.folder / "data", *arguments, **settings)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield Pair(tmp_path_factory.mktemp("pair"))


def ask(client: OpenAI, model: str, prompt: list[int], regex: str | None) -> list[int]:
    """A greedy stream to its end; whatever cuts it raises. regex: what it is held to."""
    tokens: list[int] = []
    text, finish_reason = "", None
    with client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True, "guided_regex": regex},
    ) as stream:
        for chunk in stream:
            assert chunk.choices[0].model_extra is not None
            tokens += chunk.choices[0].model_extra["token_ids"] or []
            text += chunk.choices[0].text
            finish_reason = chunk.choices[0].finish_reason or finish_reason
    assert regex is None or re.fullmatch("([a-z]{3} )*[a-z]{0,3}", text)
    assert finish_reason == "length" and len(tokens) == NUM_TOKENS
    return tokens


def answers(stack: Stack, tenant: str, models: list[str]) -> list[list[int]]:
    """Streams for one model and the other in turn, some at the same time; half of each model's
    are held to words."""
    rng = random.Random(5)
    prompts = [
        [rng.randrange(256) for _ in range(rng.randrange(4, 40))] for _ in range(NUM_STREAMS)
    ]
    with (
        stack.openai(stack.create_tenant(tenant), timeout=600) as client,
        ThreadPoolExecutor(6) as threads,
    ):
        asked = [
            threads.submit(
                ask, client, models[number % len(models)], prompt, WORDS if number & 2 else None
            )
            for number, prompt in enumerate(prompts)
        ]
        return [each.result() for each in asked]


@pytest.mark.soak
def test_streams_survive_swaps_and_answers_are_the_same(pair: Pair) -> None:
    names = list(pair.sources)
    with running(pair.stack(memory=256 << 20)) as stack:
        expected = answers(stack, "before", names)
        assert worker_metrics(stack)["loraplex_model_swaps_total"] == 2
    room = pair.sizes[1] + 3 * pair.sizes[0] // 4
    short = pair.stack(device_memory=room, max_model_wait_s=1.0, max_model_drain_s=0.2)
    with running(short) as stack:
        assert answers(stack, "after", names) == expected
        metrics = worker_metrics(stack)
        assert metrics["loraplex_model_swaps_total"] >= 4
        assert metrics["loraplex_model_on_device"] == 1
        assert metrics["loraplex_integrity_failures_total"] == 0
