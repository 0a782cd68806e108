"""Scores and ranks, in the shapes of vLLM, Jina and Cohere."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gateway.request import INSTRUCTION, JUDGE
from tests.gateway.scripts import ids, spelled
from tests.gateway.service import Service, snapshot
from tests.scripted_worker import DIGEST, LAYOUT
from workers.wire.protocol import (
    FinishReason,
    Generate,
    ModelInfo,
    OutputKind,
    Pooling,
    SequenceOutput,
)

MAX_MODEL_LEN = 2048
TEXTS = ["ccc", "a", "bb", "eeeee", "dddd"]


async def longest_is_best(request: Generate) -> AsyncIterator[SequenceOutput]:
    """The logit of yes is the length of the document, that of no is 2."""
    document = spelled(request.tokens).split("<Document>: ")[1].split("<|im_end|>")[0]
    logits = np.array([2.0, len(document)], "<f4")
    yield SequenceOutput(request.id, [], finish_reason=FinishReason.STOP, vector=logits.tobytes())


@pytest.fixture(scope="module")
def judge(store: Path) -> Iterator[Service]:
    """A gateway whose model has room for the question."""
    service = Service(store)
    service.worker.models = [ModelInfo(DIGEST, "tiny", MAX_MODEL_LEN, LAYOUT)]
    service.worker.script = longest_is_best
    service.start()
    records = service.keys.records
    larger = snapshot(records, generation=2, max_model_len=MAX_MODEL_LEN)
    service.feed(larger)
    yield service
    service.stop()


def post(service: Service, path: str, **body: Any) -> httpx.Response:
    body = {"model": "support-bot", **body}
    return service.post(path, body)


def relevance(text: str) -> float:
    return 1 / (1 + math.exp(2 - len(text)))


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_by_falling_relevance(judge: Service, path: str) -> None:
    before = len(judge.worker.requests)
    answer = post(judge, path, query="which?", documents=TEXTS)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["id"].startswith("rerank-") and body["model"] == "support-bot"
    assert [each["index"] for each in body["results"]] == [3, 4, 0, 2, 1]
    for each in body["results"]:
        assert each["document"] == {"text": TEXTS[each["index"]]}
        assert each["relevance_score"] == pytest.approx(relevance(TEXTS[each["index"]]))
    sent = judge.worker.requests[before:]
    total = sum(len(request.tokens) for request in sent)
    assert body["usage"] == {"prompt_tokens": total, "completion_tokens": 0, "total_tokens": total}
    request = sent[0]
    assert request.kind is OutputKind.EMBED and request.pooling is Pooling.LAST
    assert request.labels == (*ids("n"), *ids("y"))
    assert request.adapter is not None
    assert spelled(request.tokens) == (
        f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n<Instruct>: {INSTRUCTION}\n"
        f"<Query>: which?\n<Document>: {TEXTS[0]}<|im_end|>\n<|im_start|>assistant\n"
    )
