"""Every family against transformers and peft, in float32, over scattered pages."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapters.store.folder import LocalStore
from ops.registry import select
from tests.doubles import FAMILIES, LAID_OUT_ANEW, SIZES, make_adapter, make_model
from tests.workers.paged import PagedModel, Stream
from workers.importer import import_model
from workers.models.loading import load_model
from workers.models.plan import ModelPlan

TOLERANCE = 2e-4


FIRST_TIER = ("llama", "gemma3_text")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(family, marks=() if family in FIRST_TIER else pytest.mark.full)
        for family in (*FAMILIES, *LAID_OUT_ANEW)
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def canonical(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    return store / "models" / import_model(folder, LocalStore(store))


@pytest.fixture(scope="module")
def paged(canonical: Path) -> PagedModel:
    ops = select("cpu")
    return PagedModel(load_model(ModelPlan.read(canonical, "tiny", torch.float32), ops), ops)


@torch.no_grad()
def oracle_logits(folder: Path, tokens: list[int], adapter: Path | None = None) -> Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    return model.eval()(torch.tensor([tokens])).logits[0]


def draw_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(SIZES["vocab_size"]), k=count)


def test_chunks_and_decode_equal_transformers(paged: PagedModel, folder: Path) -> None:
    """Two sequences longer than the window of 24: odd chunks, then token by token, in one batch."""
    texts = [draw_tokens(1, 70), draw_tokens(2, 53)]
    streams, got = [Stream(), Stream()], [[], []]
    cuts = [(33, 5), (3, 27), (19, 1)] + [(1, 1)] * 15
    for step in cuts:
        work = [
            (stream, text[stream.length : stream.length + count])
            for stream, text, count in zip(streams, texts, step, strict=True)
        ]
        for rows, logits in zip(got, paged.step(work), strict=True):
            rows.append(logits)
    for text, stream, rows in zip(texts, streams, got, strict=True):
        expected = oracle_logits(folder, text[: stream.length])
        assert stream.length > 40
        torch.testing.assert_close(torch.cat(rows), expected, atol=TOLERANCE, rtol=1e-4)


def test_greedy_tokens_equal_transformers(paged: PagedModel, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt = draw_tokens(3, 30)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = oracle.generate(  # pyright: ignore[reportAttributeAccessIssue]
        torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False
    )
    assert paged.generate(Stream(), prompt, 20) == expected[0, len(prompt) :].tolist()


def test_adapters_mixed_with_base_rows_equal_peft(
    paged: PagedModel, folder: Path, tmp_path: Path
) -> None:
    adapters: list[Path | None] = [
        make_adapter(folder, tmp_path / "all", rank=8, alpha=16, seed=1),
        make_adapter(folder, tmp_path / "attention", rank=4, targets=r".*(q|qkv|o)_proj", seed=2),
        make_adapter(
            folder, tmp_path / "mlp", rank=16, targets=r".*(up_proj|down_proj|embed_tokens)", seed=3
        ),
        make_adapter(
            folder, tmp_path / "head", rank=4, targets=r".*(lm_head|embed_tokens)", seed=4
        ),
        None,
    ]
    paged.end = 0
    paged.tables.rank.zero_()
    streams = []
    for slot, adapter in enumerate(adapters):
        streams.append(Stream(slot if adapter else -1))
        if adapter is not None:
            paged.load_adapter(slot, adapter)
    texts = [draw_tokens(10 + slot, 41 + slot) for slot in range(len(adapters))]
    first = paged.step([(s, text[: 7 + s.slot]) for s, text in zip(streams, texts, strict=True)])
    rest = paged.step([(s, text[s.length :]) for s, text in zip(streams, texts, strict=True)])
    for text, adapter, *logits in zip(texts, adapters, first, rest, strict=True):
        expected = oracle_logits(folder, text, adapter)
        torch.testing.assert_close(torch.cat(logits), expected, atol=TOLERANCE, rtol=1e-4)


def test_bfloat16_stays_near_float32(canonical: Path) -> None:
    ops = select("reference")
    tokens = draw_tokens(4, 40)
    rows = [
        PagedModel(load_model(ModelPlan.read(canonical, "tiny", dtype), ops), ops).step(
            [(Stream(), tokens)]
        )[0]
        for dtype in (torch.float32, torch.bfloat16)
    ]
    error = (rows[0] - rows[1]).abs().mean() / rows[0].std()
    assert 0 < error < 0.05
