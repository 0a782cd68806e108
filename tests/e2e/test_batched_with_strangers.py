"""Batched with strangers = alone = transformers + peft, through HTTP."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from openai import OpenAI
from tokenizers import Tokenizer

from adapters.store.folder import LocalStore
from gateway.dialects.openai_format import token_text
from gateway.text.long_texts import LongTexts
from gateway.text.template_process import TemplateProcesses
from gateway.text.tokenizer import ModelTokenizer
from tests.e2e import demo
from tests.e2e.tiny import Tiny
from tests.oracle import Oracle, Verdict
from tests.scale import IS_FULL, scaled
from tests.stack import Stack, running
from tests.worker_state import worker_metrics
from workers.importer import import_model

NUM_REQUESTS = 64
NUM_TOKENS = 64
SHARED = 60
LENGTHS = [5, 20, 40, 90, 180]
"""Of prompts, in tokens: what some of them share, and what comes after it."""
MEMORY = "224MiB" if IS_FULL else "6MiB"
"""Too little for all."""
DISTURBANCES = [
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_hits_total",
    "loraplex_adapter_evictions_total",
]
MAX_ROUNDS = 5
"""Until each has happened: how many run at once, and so lack memory, is up to the machine. Answers
of each round are twice as long as before: the longer they grow together, the surer."""

pytestmark = pytest.mark.timeout(900)


class ModelFiles(NamedTuple):
    source: Path
    """The canonical folder: what transformers loads is what is served."""
    adapters: dict[str, Path]
    tokenizer: ModelTokenizer
    raw: Tokenizer


def with_adapters(folder: Path, source: Path, num_adapters: int) -> ModelFiles:
    return ModelFiles(
        source,
        demo.make_adapters(source, folder / "adapters", num_adapters),
        ModelTokenizer(source, LongTexts(), TemplateProcesses()),
        Tokenizer.from_file(str(source / "tokenizer.json")),
    )


def real(folder: Path, num_adapters: int) -> ModelFiles:
    """The demo model."""
    digest = import_model(demo.gguf(), LocalStore(folder / "store"))
    return with_adapters(folder, folder / "store" / "models" / digest, num_adapters)


def random_model(folder: Path, num_adapters: int) -> ModelFiles:
    """With as many layers as the adapters name."""
    return with_adapters(folder, Tiny(folder, num_layers=9).model, num_adapters)


def start(folder: Path, model: ModelFiles, **settings: object) -> Stack:
    return Stack(folder, "--model", f"{demo.NAME}={model.source}", **settings)


def push(stack: Stack, adapters: dict[str, Path]) -> str:
    """Returns the key of their tenant."""
    key = stack.create_tenant("acme")
    for name, folder in adapters.items():
        stack.push(folder, name, "acme")
    return key


class Asked(NamedTuple):
    model: str
    prompt: list[int]


def requests(model: ModelFiles, seed: int) -> list[Asked]:
    """Mixed lengths; some begin with a prefix shared by that adapter's requests, or by all."""
    rng = random.Random(seed)
    raw = model.raw
    models = [demo.NAME, *model.adapters]
    everywhere = demo.prompt(rng, raw, SHARED)
    asked: list[Asked] = []
    for number in range(NUM_REQUESTS):
        tokens = demo.prompt(rng, raw, rng.choice(LENGTHS))
        if rng.random() < 0.7:
            tokens = everywhere + tokens
        asked.append(Asked(models[number % len(models)], tokens))
    return asked


def answer_of(client: OpenAI, asked: Asked, num_tokens: int) -> list[int]:
    tokens = demo.complete(client, asked.model, asked.prompt, num_tokens)
    assert len(tokens) == num_tokens
    return tokens


@pytest.mark.soak
def test_batched_with_strangers_equals_alone_equals_peft(tmp_path: Path) -> None:
    """float32, with too little memory for all: preempted and evicted, yet the oracle's tokens. Of
    the demo model in the full form, of a random one in the suite."""
    model = (real if IS_FULL else random_model)(tmp_path, len(demo.ADAPTERS))
    stack = start(tmp_path / "data", model, dtype="float32", memory=MEMORY, max_num_seqs=48)
    asked: list[Asked] = []
    answers: list[list[int]] = []
    num_tokens = NUM_TOKENS
    with running(stack):
        key = push(stack, model.adapters)
        with stack.openai(key, timeout=600) as client, ThreadPoolExecutor(NUM_REQUESTS) as pool:
            for seed in range(1, MAX_ROUNDS + 1):
                ours = requests(model, seed)
                asked += ours
                lengths = repeat(num_tokens, len(ours))
                answers += pool.map(partial(answer_of, client), ours, lengths)
                if all(counts := [worker_metrics(stack)[name] for name in DISTURBANCES]):
                    break
                num_tokens *= 2
    print(f"\n{len(asked)} requests, {dict(zip(DISTURBANCES, counts, strict=True))}")
    assert all(counts)
    oracle = Oracle(model.source, model.adapters)
    verdict = Verdict()
    for one, answer in sorted(zip(asked, answers, strict=True)):
        adapter = None if one.model == demo.NAME else one.model
        oracle.judge(verdict, one.prompt, answer, adapter, one.model)
    verdict.assert_equal()


@pytest.mark.full
@pytest.mark.soak
def test_bfloat16_is_no_worse_than_peft_in_bfloat16(tmp_path: Path) -> None:
    """Teacher-forced on the float32 oracle's own tokens: agreement and mean logprob difference, of
    the demo model."""
    model = real(tmp_path, scaled(1, 8))
    adapters = model.adapters
    exact = Oracle(model.source, adapters)
    rounded = Oracle(model.source, adapters, torch.bfloat16)
    rng = random.Random(5)
    texts = {name: demo.prompt(rng, model.raw, 120) for name in adapters}
    ours, theirs = Errors(), Errors()
    with running(start(tmp_path / "data", model, dtype="bfloat16", memory="512MiB")) as stack:
        key = push(stack, adapters)
        with stack.openai(key, timeout=600) as client:
            for name, tokens in texts.items():
                forced = exact.generate(tokens, name, scaled(24, 64))
                expected = exact.logits(forced, name).log_softmax(-1)[:-1]
                theirs.add(expected, rounded.logits(forced, name).log_softmax(-1)[:-1], forced)
                answer = client.completions.create(
                    model=name, prompt=forced, max_tokens=0, echo=True, logprobs=1
                )
                ours.add_echo(expected, answer.choices[0].logprobs, forced, model.tokenizer)
    print(json.dumps({"ours": ours.summary, "peft bfloat16": theirs.summary}))
    assert ours.disagreement <= theirs.disagreement * 1.1 + 0.005
    assert ours.mean_difference <= theirs.mean_difference * 1.1


class Errors:
    """How far log-probabilities of the forced tokens are from the oracle's."""

    def __init__(self) -> None:
        self.agreements: list[bool] = []
        self.differences: list[float] = []

    def add(self, expected: torch.Tensor, got: torch.Tensor, forced: list[int]) -> None:
        """expected, got: float32 log-probabilities [len(forced) - 1, V]."""
        targets = torch.tensor(forced[1:])[:, None]
        self.agreements += (expected.argmax(-1) == got.argmax(-1)).tolist()
        difference = (expected.gather(1, targets) - got.gather(1, targets)).abs()
        self.differences += difference.flatten().tolist()

    def add_echo(
        self, expected: torch.Tensor, logprobs: object, forced: list[int], tokenizer: ModelTokenizer
    ) -> None:
        best = [
            max(top, key=lambda text: top[text])
            for top in logprobs.top_logprobs[1:]  # pyright: ignore
        ]
        spelled = tokenizer.spelling.all
        by_text = {token_text(spelled[i]): i for i in range(expected.shape[1])}
        ids = torch.tensor([by_text[text] for text in best])
        self.agreements += (expected.argmax(-1) == ids).tolist()
        exact = expected.gather(1, torch.tensor(forced[1:])[:, None]).flatten().tolist()
        got = logprobs.token_logprobs[1:]  # pyright: ignore
        self.differences += [abs(a - b) for a, b in zip(exact, got, strict=True)]

    @property
    def disagreement(self) -> float:
        return 1 - float(np.mean(self.agreements))

    @property
    def mean_difference(self) -> float:
        return float(np.mean(self.differences))

    @property
    def summary(self) -> dict[str, float]:
        return {
            "tokens": len(self.differences),
            "argmax agreement": 1 - self.disagreement,
            "mean |logprob difference|": self.mean_difference,
        }
