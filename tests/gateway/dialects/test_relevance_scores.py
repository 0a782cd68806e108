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
from tests.gateway.scripted import DIGEST, LAYOUT
from tests.gateway.scripts import ids, spelled
from tests.gateway.service import Service, snapshot
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
    service.loop.call_soon_threadsafe(service.source.feed, larger)
    service.wait_for(lambda: service.gateway.catalog.current.generation == 2)
    yield service
    service.stop()


def post(service: Service, path: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {service.keys.acme}"}
    body = {"model": "support-bot", **body}
    return httpx.post(service.url + path, json=body, headers=headers, timeout=20)


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


def test_what_is_shown_of_the_documents(judge: Service) -> None:
    documents = [{"text": text} for text in TEXTS]
    answer = post(
        judge, "/v1/rerank", query="q", documents=documents, top_n=2, return_documents=False
    )
    results = answer.json()["results"]
    assert [each["index"] for each in results] == [3, 4]
    assert all(each.keys() == {"index", "relevance_score"} for each in results)


@pytest.mark.parametrize(
    ("one", "other", "scored"),
    [
        ("q", "aa", ["aa"]),
        ("q", TEXTS, TEXTS),
        (["q"], TEXTS, TEXTS),
        (["q", "r"], ["a", "bb"], ["a", "bb"]),
    ],
)
def test_scores_come_in_the_order_of_the_texts(
    judge: Service, one: Any, other: Any, scored: list[str]
) -> None:
    body = post(judge, "/v1/score", text_1=one, text_2=other).json()
    assert body["object"] == "list" and body["id"].startswith("score-")
    assert [each["index"] for each in body["data"]] == list(range(len(scored)))
    for each, text in zip(body["data"], scored, strict=True):
        assert each["object"] == "score"
        assert each["score"] == pytest.approx(relevance(text))
    assert body == {**body, "model": "support-bot"} and body["usage"]["prompt_tokens"] > 0


def test_the_instruction_is_asked_with(judge: Service) -> None:
    post(judge, "/score", text_1="q", text_2="a", instruction="Match rhymes")
    assert "<Instruct>: Match rhymes\n" in spelled(judge.worker.requests[-1].tokens)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "q", "documents": [{"image": "a"}]}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "max_chunks_per_doc": 2}, None),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "q", "documents": ["a" * MAX_MODEL_LEN]}, None),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["b" * 1500] * 200}, "text_2"),
    ],
)
def test_what_is_refused(judge: Service, path: str, body: dict[str, Any], param: Any) -> None:
    before = len(judge.worker.requests)
    answer = post(judge, path, **body)
    assert answer.status_code == 400, answer.text
    assert param in (None, answer.json()["error"]["param"])
    assert len(judge.worker.requests) == before
