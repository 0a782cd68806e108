"""Clients that do not read: their answers are bounded in bytes and in time, and hold all that their
requests hold until they are read."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import telemetry
from gateway.limits.bounds import AnswerSize
from gateway.text.tokenizer import ModelTokenizer
from tests.doubles import SIZES
from tests.gateway.scripts import ids, say
from tests.gateway.service import Service
from web.held_bytes import AnswerBudget, HeldAnswer
from workers.wire.protocol import Generate, SequenceOutput

SLOW_S = 1.0
IM_START = 259
"""Token of 12 characters."""
TEXTS = ["a"] * 2048
FORMS = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
EMBEDDINGS = ("/v1/embeddings", {"input": TEXTS})
ALL_FORMS = ("/v2/embed", {"texts": TEXTS, "embedding_types": FORMS})
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def slow(store: Path) -> Iterator[Service]:
    """Its connections have small send buffers, so that a client that reads nothing is noticed."""
    with Service(store, slow_client_s=SLOW_S, send_buffer=16 << 10) as service:
        yield service


@pytest.fixture(autouse=True)
def says_hello(slow: Service) -> None:
    slow.worker.script = say("hello")


def asking(service: Service, path: str, body: dict[str, Any], key: str = "") -> socket.socket:
    """Returns a connection with a small receive buffer on which a request was sent."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", service.port))
    data = json.dumps({"model": "tiny", **body}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
        f"authorization: Bearer {key or service.keys.acme}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


def read_head(connection: socket.socket) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(1)
    return head


def num_slow_readers() -> float:
    return telemetry.connections_refused.totals().get(("slow_reader",), (0,))[0]


async def flood(request: Generate) -> AsyncIterator[SequenceOutput]:
    while True:
        await asyncio.sleep(0.001)
        yield SequenceOutput(id=request.id, tokens=ids("x" * 2000))


@pytest.mark.parametrize(
    ("path", "body"),
    [EMBEDDINGS, ALL_FORMS, ("/v1/chat/completions", {**MESSAGES, "stream": True})],
    ids=["embeddings", "forms", "stream"],
)
def test_a_client_that_reads_only_the_head_keeps_its_slot_until_it_is_cut(
    slow: Service, path: str, body: dict[str, Any]
) -> None:
    if "stream" in body:
        slow.worker.script = flood
    before = num_slow_readers()
    with asking(slow, path, body) as connection:
        assert read_head(connection).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        num_held = 0
        while slow.gateway.admission.num_open:
            num_held = max(num_held, slow.answers.owned_by("ten_acme"))
            assert len(slow.gateway.in_flight_requests.open) == 1
            assert time.monotonic() < began + 30
            time.sleep(0.01)
        assert time.monotonic() > began + SLOW_S * 0.7
        assert num_held > 0
        slow.wait_for(lambda: slow.answers.num_bytes == 0)
        assert num_slow_readers() == before + 1
        with suppress(ConnectionResetError):
            while connection.recv(65536):
                pass


def test_a_client_that_reads_gets_the_whole_answer_and_may_ask_again(slow: Service) -> None:
    path, body = ALL_FORMS
    with httpx.Client(base_url=slow.url, timeout=60) as client:
        for _ in range(2):
            answer = client.post(
                path,
                json={"model": "tiny", **body},
                headers={"authorization": f"Bearer {slow.keys.acme}"},
            )
            vectors = answer.json()["embeddings"]
            assert {form: len(each) for form, each in vectors.items()} == dict.fromkeys(
                FORMS, len(TEXTS)
            )
            assert answer.json()["texts"] == TEXTS
    slow.wait_for(lambda: slow.answers.num_bytes == 0)


def test_a_tenants_unread_answers_are_bounded_before_they_are_generated(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third has no room, and no worker computes it; the fourth is not even tokenised, but a
    small one is answered; another tenant has room; and once one was read there is room again."""
    service = Service(store, send_buffer=16 << 10)
    one = AnswerSize(len(TEXTS), 0, 0, 0, len(TEXTS) * SIZES["hidden_size"]).num_bytes
    service.answers = AnswerBudget(4 * (2 * one - one // 8))
    with service:
        with ExitStack() as stack:
            path, body = EMBEDDINGS
            held: list[socket.socket] = []
            for _ in range(2):
                held.append(stack.enter_context(asking(service, path, body)))
                assert read_head(held[-1]).startswith(b"HTTP/1.1 200")
            num_requests = len(service.worker.requests)
            refused = stack.enter_context(asking(service, path, body))
            assert b"503" in read_head(refused)
            assert b"too_many_unread" in refused.recv(4096)
            assert len(service.worker.requests) == num_requests
            monkeypatch.setattr(ModelTokenizer, "encode_many", None)
            monkeypatch.setattr("web.held_bytes.CHEAP_BODY_BYTES", 1024)
            early = stack.enter_context(asking(service, path, body))
            assert b"503" in read_head(early)
            monkeypatch.undo()
            small = stack.enter_context(asking(service, path, {"input": "a"}))
            assert b" 200 " in read_head(small)
            other = stack.enter_context(asking(service, path, body, service.keys.globex))
            assert read_head(other).startswith(b"HTTP/1.1 200")
            held[0].close()
            service.wait_for(lambda: service.answers.owned_by("ten_acme") < 2 * one)
            again = stack.enter_context(asking(service, path, body))
            assert read_head(again).startswith(b"HTTP/1.1 200")
        service.wait_for(lambda: service.answers.num_bytes == 0)


def test_an_answer_that_no_worker_computes_is_refused_when_it_has_no_room(slow: Service) -> None:
    tokens = [IM_START] * 32_768
    most = slow.answers.max_tenant_bytes
    slow.answers.max_tenant_bytes = len(tokens) * 18
    try:
        with asking(slow, "/detokenize", {"tokens": tokens}) as first:
            assert read_head(first).startswith(b"HTTP/1.1 200")
            with asking(slow, "/detokenize", {"tokens": tokens}) as second:
                assert read_head(second).startswith(b"HTTP/1.1 503")
                assert b"too_many_unread" in second.recv(4096)
    finally:
        slow.answers.max_tenant_bytes = most
    slow.wait_for(lambda: slow.answers.num_bytes == 0)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_accepted_answer_fits_the_bytes_reserved_for_it(slow: Service, data: Any) -> None:
    reserved: list[int] = []
    reserve = HeldAnswer.reserve

    def noted(self: HeldAnswer, num_bytes: int) -> None:
        reserved.append(num_bytes)
        reserve(self, num_bytes)

    path = data.draw(
        st.sampled_from(["/v1/embeddings", "/v2/embed", "/v1/completions", "/v1/chat/completions"])
    )
    text = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)
    texts = data.draw(st.lists(text.filter(bool), min_size=1, max_size=20))
    body: dict[str, Any] = {
        "/v1/embeddings": lambda: {
            "input": texts,
            "encoding_format": data.draw(st.sampled_from(["float", "base64"])),
        },
        "/v2/embed": lambda: {
            "texts": texts,
            "embedding_types": data.draw(st.lists(st.sampled_from(FORMS), min_size=1, max_size=6)),
        },
        "/v1/completions": lambda: {
            "prompt": texts[:4],
            "n": data.draw(st.integers(1, 3)),
            "echo": data.draw(st.booleans()),
            "logprobs": data.draw(st.none() | st.integers(0, 5)),
            "prompt_logprobs": data.draw(st.none() | st.integers(0, 5)),
            "return_token_ids": data.draw(st.booleans()),
            "max_tokens": data.draw(st.integers(1, 20)),
        },
        "/v1/chat/completions": lambda: {
            **MESSAGES,
            "logprobs": True,
            "top_logprobs": data.draw(st.integers(0, 20)),
            "max_tokens": data.draw(st.integers(1, 20)),
        },
    }[path]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeldAnswer, "reserve", noted)
        answer = slow.post(path, {"model": "tiny", **body})
    if answer.status_code == 200:
        assert len(answer.content) <= reserved[0]
