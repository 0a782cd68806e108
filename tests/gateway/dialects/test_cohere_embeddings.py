"""Embeddings in Cohere's form, as its official client asks for them and reads them."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from tests.gateway.dialects.test_embeddings import unit, vector
from tests.gateway.scripted import ScriptedWorker
from tests.gateway.scripts import embed, ids, spelled
from tests.gateway.service import Service
from workers.wire.protocol import OutputKind

TEXTS = ["Where is it?", "It is late."]
PART = {"type": "text", "text": "one"}
TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


@pytest.fixture(autouse=True)
def script(worker: ScriptedWorker) -> None:
    worker.script = embed


def post(service: Service, **body: Any) -> httpx.Response:
    """Posts what Cohere's client sends, which always has a model and a type of input."""
    headers = {"authorization": f"Bearer {service.keys.acme}", "x-client-name": "test"}
    body = {"model": "tiny", "input_type": "search_document", **body}
    return httpx.post(f"{service.url}/v2/embed", json=body, headers=headers, timeout=20)


def test_every_type_of_one_vector(service: Service, worker: ScriptedWorker) -> None:
    answer = post(service, texts=TEXTS, embedding_types=TYPES)
    assert answer.status_code == 200, answer.text
    assert answer.headers["loraplex-dropped"] == "input_type"
    body = answer.json()
    assert body["id"].startswith("embd-") and body["response_type"] == "embeddings_by_type"
    assert body["texts"] == TEXTS
    billed = {"input_tokens": sum(map(len, TEXTS)), "image_tokens": 0}
    assert body["meta"] == {"api_version": {"version": "2"}, "billed_units": billed}
    assert body["embeddings"].keys() == set(TYPES)
    for number, text in enumerate(TEXTS):
        wanted = unit(vector(ids(text)))
        found = {name: vectors[number] for name, vectors in body["embeddings"].items()}
        assert np.allclose(found["float"], wanted, atol=1e-6)
        assert np.allclose(np.frombuffer(base64.b64decode(found["base64"]), "<f4"), wanted)
        scaled = np.rint(wanted / np.abs(wanted).max() * 127)
        assert found["int8"] == scaled.tolist()
        assert found["uint8"] == (scaled + 128).tolist()
        bits = np.packbits(wanted > 0)
        assert found["ubinary"] == bits.tolist()
        assert found["binary"] == [int(byte) - 128 for byte in bits]
        near = np.dot(scaled, wanted) / np.linalg.norm(scaled)
        assert near > 0.999
    assert worker.requests[-1].kind is OutputKind.EMBED


def test_floats_of_leading_numbers_unless_more_is_asked_for(service: Service) -> None:
    body = post(service, model="support-bot", texts=["x"], output_dimension=5).json()
    assert body["embeddings"].keys() == {"float"}
    assert np.allclose(body["embeddings"]["float"][0], unit(vector(ids("x"))[:5]), atol=1e-6)
    bits = post(service, texts=["x"], output_dimension=5, embedding_types=["ubinary"]).json()
    packed = np.packbits(vector(ids("x"))[:5] > 0)
    assert bits["embeddings"] == {"ubinary": [packed.tolist()]}


def test_inputs_of_parts(service: Service, worker: ScriptedWorker) -> None:
    parts = [PART, {"type": "text", "text": "two"}]
    body = post(service, inputs=[{"content": parts}, {"content": [PART]}]).json()
    assert body["texts"] == ["one\ntwo", "one"]
    assert [spelled(each.tokens) for each in worker.requests[-2:]] == ["one\ntwo", "one"]


def test_where_a_text_is_cut(service: Service, worker: ScriptedWorker) -> None:
    """At its end unless something else is asked for."""
    most = worker.models[0].max_model_len
    long = "a" * most + "b" * 9
    for asked, kept in (
        ({}, long[:most]),
        ({"truncate": "END"}, long[:most]),
        ({"truncate": "START"}, long[-most:]),
        ({"max_tokens": 3}, long[:3]),
        ({"max_tokens": 3, "truncate": "START"}, long[-3:]),
    ):
        assert post(service, texts=[long], **asked).status_code == 200
        assert spelled(worker.requests[-1].tokens) == kept
    refused = post(service, texts=[long], truncate="NONE").json()["error"]
    assert refused["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "texts", "either 'texts' or 'inputs'"),
        ({"texts": ["a"], "inputs": [{"content": ["a"]}]}, "inputs", "object"),
        ({"texts": ["a"], "inputs": [{"content": [PART]}]}, "texts", "either"),
        ({"texts": []}, "texts", ""),
        ({"texts": [""]}, "texts", "empty"),
        ({"texts": ["a"] * 2049}, "texts", ""),
        ({"images": ["data:image/png;base64,"]}, "images", "Only text is read"),
        (
            {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "inputs",
            "Only text is read",
        ),
        ({"texts": ["a"], "input_type": "image"}, "input_type", "search_query"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types", "ubinary"),
        ({"texts": ["a"], "output_dimension": 65}, "output_dimension", "64 dimensions"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate", "NONE"),
        ({"texts": ["a"], "truncate": "NONE", "max_tokens": 3}, "max_tokens", "truncate"),
        ({"texts": ["a"], "fusion": 1}, "fusion", "Unsupported parameter"),
    ],
)
def test_what_is_refused(
    service: Service, worker: ScriptedWorker, body: dict[str, Any], param: str, said: str
) -> None:
    before = len(worker.requests)
    answer = post(service, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"]
    assert len(worker.requests) == before
