"""Vectors of prompts through the whole worker, against transformers + peft."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModel

from adapters.store.folder import LocalStore
from tests.oracle import Oracle, Verdict
from tests.workers.driver import Driver
from tests.workers.process.test_worker import Setup
from workers.importer import import_model
from workers.wire.protocol import (
    ErrorCode,
    FinishReason,
    Generate,
    OutputKind,
    Pooling,
    SamplingParams,
)

ADAPTERS = {
    "r4": {"rank": 4},
    "r12-mlp": {"rank": 12, "targets": ["gate_proj", "down_proj"]},
    "bare": {
        "rank": 6,
        "task_type": "FEATURE_EXTRACTION",
        "targets": ["q_proj", "up_proj"],
        "rank_pattern": {"^layers.1.mlp.up_proj": 9},
    },
}
"""`bare` is of the model without its output matrix: its tensors' names lack `model.`."""
LABELS = (7, 300, 41)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("llama"), "llama", ADAPTERS)


class Oracles:
    """One for adapters of the model with its output matrix, one for those without."""

    def __init__(self, llama: Setup) -> None:
        whole = {name: path for name, path in llama.folders.items() if name != "bare"}
        self.whole = Oracle(llama.model, whole)
        self._bare = Oracle(llama.model, {"bare": llama.folders["bare"]}, kind=AutoModel)

    def of(self, adapter: str | None) -> Oracle:
        return self._bare if adapter == "bare" else self.whole


@pytest.fixture(scope="module")
def oracle(llama: Setup) -> Oracles:
    return Oracles(llama)


@dataclass
class Asked:
    request: Generate
    adapter: str | None


def embed(
    llama: Setup,
    number: int,
    prompt: list[int],
    name: str | None,
    pooling: Pooling = Pooling.LAST,
    labels: tuple[int, ...] = (),
) -> Asked:
    request = Generate(
        number,
        str(number),
        llama.digest,
        prompt,
        SamplingParams(max_tokens=0, seed=0),
        cache_domain="t",
        adapter=None if name is None else llama.refs[name],
        kind=OutputKind.EMBED,
        pooling=pooling,
        labels=labels,
    )
    return Asked(request, name)


def vector(driver: Driver, number: int) -> NDArray[np.float32]:
    (output,) = driver.outputs[number]
    assert output.finish_reason is FinishReason.STOP and output.tokens == []
    assert output.vector is not None
    return np.frombuffer(output.vector, "<f4")


def expected(oracle: Oracles, asked: Asked) -> NDArray[np.float32]:
    request = asked.request
    if request.labels:
        logits = oracle.of(asked.adapter).logits(request.tokens, asked.adapter, last=1)[0]
        return logits[list(request.labels)].numpy()
    hidden = oracle.of(asked.adapter).hidden(request.tokens, asked.adapter).numpy()
    match request.pooling:
        case Pooling.MEAN:
            return hidden.mean(0)
        case Pooling.CLS:
            return hidden[0]
        case Pooling.LAST:
            return hidden[-1]


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["in-turn", "ahead"])
def test_vectors_of_two_adapters_beside_streams_equal_peft(
    llama: Setup, oracle: Oracles, runs_ahead: bool
) -> None:
    """In little memory and small chunks: prompts share prefixes, sequences are preempted, and no
    position is pooled twice or left out."""
    rng = random.Random(5)
    shared = [rng.randrange(256) for _ in range(40)]
    config = llama.config(ops="cpu", memory=8 << 16, runs_ahead=runs_ahead, max_batched_tokens=48)
    asked: list[Asked] = []
    streams: list[Asked] = []
    for number in range(48):
        is_stream, labels = number % 4 == 0, LABELS if number % 4 == 3 else ()
        name = rng.choice([None, "r4", "r12-mlp", *([] if is_stream or labels else ["bare"])])
        own = [rng.randrange(256) for _ in range(rng.randrange(1, 90))]
        prompt = (shared if rng.random() < 0.6 else []) + own
        if is_stream:
            ref = None if name is None else llama.refs[name]
            streams.append(Asked(llama.generate(number, prompt, 80, ref), name))
        else:
            pooling = Pooling.LAST if labels else rng.choice(list(Pooling))
            asked.append(embed(llama, number, prompt, name, pooling, labels))
    with Driver(config) as driver:
        for each in sorted(asked + streams, key=lambda each: each.request.id):
            driver.submit(each.request)
        driver.wait()
        scheduler = driver.worker.instances[llama.digest].engine.scheduler
        assert scheduler.num_preemptions > 0
        assert scheduler.num_hit_tokens > 0
    for each in asked:
        given, wanted = vector(driver, each.request.id), expected(oracle, each)
        assert given.shape == wanted.shape
        assert cosine(given, wanted) >= 0.9999, each.request.pooling
        assert np.allclose(given, wanted, rtol=1e-3, atol=2e-3)
    verdict = Verdict()
    for each in streams:
        answer = driver.answers[each.request.id]
        oracle.whole.judge(verdict, each.request.tokens, answer, each.adapter, str(each.request.id))
    verdict.assert_equal()


def test_cached_positions_are_skipped_for_the_last_token_only(
    llama: Setup, oracle: Oracles
) -> None:
    prompt = [number % 200 for number in range(64)]
    with Driver(llama.config(ops="cpu")) as driver:
        for number, pooling in enumerate([Pooling.MEAN, Pooling.LAST, Pooling.MEAN, Pooling.CLS]):
            asked = embed(llama, number, prompt, "r4", pooling)
            driver.run(asked.request)
            assert cosine(vector(driver, number), expected(oracle, asked)) >= 0.9999
    cached = [driver.outputs[number][0].num_cached_tokens for number in range(4)]
    assert cached == [0, 48, 0, 0]


def test_a_base_model_saved_without_its_output_matrix(llama: Setup, tmp_path: Path) -> None:
    """AutoModel's tensors have names without `model.`; the same vectors as transformers' own."""
    source = shutil.copytree(llama.folder / "source", tmp_path / "bare")
    bare = AutoModel.from_pretrained(source, dtype=torch.float32)
    bare.save_pretrained(source)
    assert "embed_tokens.weight" in load_file(source / "model.safetensors")
    digest = import_model(source, LocalStore(llama.folder / "store"))
    assert digest != llama.digest
    prompt = [number % 200 for number in range(50)]
    with Driver(llama.config(ops="cpu", models={"bare": digest})) as driver:
        request = embed(llama, 0, prompt, None, Pooling.MEAN).request
        driver.run(msgspec.structs.replace(request, model=digest))
    with torch.inference_mode():
        hidden = bare(torch.tensor([prompt])).last_hidden_state[0]
    assert cosine(vector(driver, 0), hidden.mean(0).numpy()) >= 0.9999


def test_what_makes_no_vector_is_refused(llama: Setup) -> None:
    plain = embed(llama, 0, [1, 2], None).request
    wrong = [
        msgspec.structs.replace(plain, params=SamplingParams(max_tokens=1, seed=0)),
        msgspec.structs.replace(plain, labels=LABELS, pooling=Pooling.MEAN),
        msgspec.structs.replace(plain, labels=(320,)),
        msgspec.structs.replace(plain, labels=LABELS, kind=OutputKind.GENERATE),
        msgspec.structs.replace(plain, labels=tuple(range(65))),
    ]
    with Driver(llama.config(ops="cpu")) as driver:
        for number, request in enumerate(wrong):
            driver.submit(msgspec.structs.replace(request, id=number))
        driver.wait()
    assert set(driver.ended.values()) == {ErrorCode.INVALID}
