"""Embeddings in Cohere's form, as its official client asks for them and reads them."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from tests.gateway.dialects.test_embeddings import unit, vector
from tests.gateway.scripts import embed, ids
from tests.gateway.service import Service
from tests.scripted_worker import ScriptedWorker
from workers.wire.protocol import OutputKind

TEXTS = ["Where is it?", "It is late."]
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
