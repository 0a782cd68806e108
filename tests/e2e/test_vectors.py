"""Embeddings and ranks by the whole product, against transformers + peft."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModel, AutoTokenizer

from gateway.request import Pair
from tests.doubles import make_adapter
from tests.e2e.tiny import NAME, Tiny
from tests.oracle import Oracle
from tests.stack import Stack

pytestmark = pytest.mark.full

LETTERS = "abcdefghij klmnop"


@pytest.fixture(scope="module")
def folders(tiny: Tiny) -> dict[str, Path]:
    """`bare` is of the model without its output matrix, as embeddings are trained."""
    tasks = {"chat": "CAUSAL_LM", "bare": "FEATURE_EXTRACTION"}
    return {
        name: make_adapter(tiny.model, tiny.folder / name, seed=seed, b_std=0.5, task_type=task)
        for seed, (name, task) in enumerate(tasks.items())
    }


@pytest.fixture(scope="module")
def key(stack: Stack, folders: dict[str, Path]) -> str:
    key = stack.create_tenant("acme")
    stack.push(folders["chat"], "chat", "acme")
    stack.push(folders["bare"], "bare", "acme", serving='{"pooling": "mean"}')
    return key


def texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(LETTERS, k=rng.randrange(1, 90))) for _ in range(count)]


def test_vectors_of_two_adapters_at_once_equal_peft(
    tiny: Tiny, folders: dict[str, Path], stack: Stack, key: str
) -> None:
    """Last token and mean, beside a stream; what was used is in the tenant's usage."""
    oracles = {
        "chat": Oracle(tiny.model, {"chat": folders["chat"]}),
        "bare": Oracle(tiny.model, {"bare": folders["bare"]}, kind=AutoModel),
    }
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    given = {"chat": texts(1, 12), "bare": texts(2, 12), NAME: texts(3, 4)}
    with stack.openai(key, timeout=60) as client, ThreadPoolExecutor() as pool:
        stream = client.completions.create(
            model="chat",
            prompt="Once",
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        answers = dict(
            zip(
                given,
                pool.map(lambda m: client.embeddings.create(model=m, input=given[m]), given),
                strict=True,
            )
        )
        assert sum(1 for chunk in stream if chunk.choices[0].text) > 100
    for model, answer in answers.items():
        num_tokens = 0
        for text, entry in zip(given[model], answer.data, strict=True):
            tokens = tokenizer(text).input_ids
            num_tokens += len(tokens)
            adapter = None if model == NAME else model
            hidden = oracles.get(model, oracles["chat"]).hidden(tokens, adapter).numpy()
            wanted = hidden.mean(0) if model == "bare" else hidden[-1]
            cosine = np.dot(entry.embedding, wanted) / np.linalg.norm(wanted)
            assert cosine >= 0.9999 and abs(np.linalg.norm(entry.embedding) - 1) < 1e-5
        assert answer.usage.prompt_tokens == num_tokens


def test_documents_are_ranked_as_peft_ranks_them(
    tiny: Tiny, folders: dict[str, Path], stack: Stack, key: str
) -> None:
    oracle = Oracle(tiny.model, {"chat": folders["chat"]})
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny.model)
    no, yes = (tokenizer(word).input_ids[0] for word in ("no", "yes"))
    documents = texts(5, 24)

    def score(document: str) -> float:
        messages = [each.for_template() for each in Pair("where?", document).messages()]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        logits = oracle.logits(tokens, "chat", last=1)[0]
        return 1 / (1 + math.exp(logits[no] - logits[yes]))

    wanted = [score(document) for document in documents]
    body = {"model": "chat", "query": "where?", "documents": documents}
    with stack.openai(key, timeout=60) as client:
        answer: Any = client.post("/rerank", body=body, cast_to=dict[str, Any])  # pyright: ignore
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(wanted[each["index"]], abs=1e-5)
    shown = [wanted[each["index"]] for each in answer["results"]]
    assert all(one >= other - 1e-5 for one, other in pairwise(shown))
    assert max(shown) - min(shown) > 0.01
