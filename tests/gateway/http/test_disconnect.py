"""A client that leaves frees its work; a worker that fails is never mistaken for an end."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.dispatch.generation import Generation
from gateway.http.streaming import Client
from tests.gateway.scripts import endless, ids, say, silence
from tests.gateway.service import Service
from tests.scripted_worker import ScriptedWorker
from workers.wire.client import WorkerFailed
from workers.wire.protocol import ErrorCode, FinishReason, Generate, SequenceOutput

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def impatient(store: Path) -> Iterator[Service]:
    """Pings after 0.2 s of silence, and cuts after half a second without reading."""
    with Service(store, ping_interval_s=0.2, slow_client_s=0.5) as service:
        yield service


def raw_request(service: Service, body: dict[str, Any], receive_buffer: int = 0) -> socket.socket:
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", service.port))
    data = json.dumps({"model": "tiny", "messages": HELLO, **body}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
        f"authorization: Bearer {service.keys.acme}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


def assert_all_freed(service: Service, worker: ScriptedWorker, before: int) -> None:
    service.wait_for(lambda: len(worker.requests) > before)
    mine = worker.requests[before:]
    service.wait_for(lambda: all(request in worker.aborted for request in mine))
    service.wait_for(lambda: service.gateway.admission.num_open == 0)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_closing_the_connection_aborts(
    service: Service, worker: ScriptedWorker, stream: bool, n: int
) -> None:
    worker.script = endless() if stream else silence
    before = len(worker.requests)
    connection = raw_request(service, {"stream": stream, "n": n})
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    service.wait_for(lambda: len(worker.requests) == before + n)
    connection.close()
    assert_all_freed(service, worker, before)


def test_leaving_before_the_request_is_whole_is_no_error(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
            b"authorization: Bearer %s\r\n\r\n{" % service.keys.acme.encode()
        )
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    httpx.get(f"http://127.0.0.1:{service.port}/livez")
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []


def test_closing_before_the_first_token_aborts(service: Service, worker: ScriptedWorker) -> None:
    worker.script = silence
    before = len(worker.requests)
    connection = raw_request(service, {"stream": True})
    service.wait_for(lambda: len(worker.requests) == before + 1)
    connection.close()
    assert_all_freed(service, worker, before)


def test_nothing_is_kept_of_who_left_before_the_first_token(
    service: Service, worker: ScriptedWorker
) -> None:
    """Or a flood of them would fill the memory until their deadlines."""

    def kept() -> list[Generation]:
        """But for those of earlier tests, which may still be about to end."""
        gc.collect()
        return [each for each in gc.get_objects() if type(each) is Generation and each not in known]

    worker.script = silence
    known = weakref.WeakSet[Generation]()
    known.update(kept())
    before = len(worker.requests)
    connection = raw_request(service, {"stream": True})
    service.wait_for(lambda: len(worker.requests) == before + 1)
    assert len(kept()) == 1
    connection.close()
    assert_all_freed(service, worker, before)
    service.wait_for(lambda: not kept())


async def test_a_client_that_leaves_in_two_ways_ends_its_answer_once() -> None:
    lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer() -> str:
        with Client(lost) as client:
            client.leave()
            lost.set_result(None)
            await asyncio.sleep(20)
        return "ended as if it were done"

    assert await asyncio.create_task(answer()) == "ended as if it were done"


async def test_a_client_that_leaves_at_the_end_disturbs_nothing_after_it() -> None:
    lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer() -> str:
        with Client(lost):
            lost.set_result(None)
        await asyncio.sleep(0.01)
        return "settled"

    assert await asyncio.create_task(answer()) == "settled"


def test_a_hundred_streams_closed_midway(service: Service, worker: ScriptedWorker) -> None:
    worker.script = endless(0.02)
    before = len(worker.requests)
    tasks = service.call(lambda: len(asyncio.all_tasks()))
    connections = [raw_request(service, {"stream": True}) for _ in range(100)]
    for i, connection in enumerate(connections):
        connection.recv(50 + i)
        connection.close()
    assert_all_freed(service, worker, before)
    service.wait_for(lambda: service.call(lambda: len(asyncio.all_tasks())) <= tasks)


def test_the_openai_client_closing_its_stream(
    client: openai.OpenAI, service: Service, worker: ScriptedWorker
) -> None:
    worker.script = endless()
    before = len(worker.requests)
    with client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        next(iter(stream))
    client.close()
    assert_all_freed(service, worker, before)


def fails_after(text: str, code: ErrorCode):
    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        for token in ids(text):
            yield SequenceOutput(id=request.id, tokens=[token])
        raise WorkerFailed(code, "The worker is gone.")

    return script


@pytest.mark.parametrize("n", [1, 2])
def test_a_worker_lost_midway_is_an_error(
    client: openai.OpenAI, worker: ScriptedWorker, n: int
) -> None:
    worker.script = fails_after("some", ErrorCode.WORKER_LOST)
    text = ""
    with pytest.raises(openai.APIError, match="The worker is gone") as failure:
        for chunk in client.chat.completions.create(model="tiny", messages=HELLO, stream=True, n=n):
            text += chunk.choices[0].delta.content or ""
    assert text == "some" if n == 1 else text.startswith("s")
    assert failure.value.code == "worker_lost"


def test_a_worker_that_dies_and_comes_back(store: Path) -> None:
    with Service(store) as service:
        service.worker.script = endless()
        with (
            service.client() as client,
            pytest.raises(openai.APIError) as failure,
            client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream,
        ):
            for i, _chunk in enumerate(stream):
                if i == 3:
                    service.await_in_loop(service.worker.stop)
        assert failure.value.code == "worker_lost"
        assert httpx.get(f"{service.url}/readyz").status_code == 503
        service.worker.script = say("back")
        service.await_in_loop(service.worker.start)
        service.wait_for(lambda: httpx.get(f"{service.url}/readyz").status_code == 200)
        with service.client() as client:
            answer = client.chat.completions.create(model="tiny", messages=HELLO)
        assert answer.choices[0].message.content == "back"
        service.wait_for(lambda: service.gateway.admission.num_open == 0)


def test_after_an_error_event_there_is_no_done(service: Service, worker: ScriptedWorker) -> None:
    worker.script = fails_after("some", ErrorCode.WORKER_LOST)
    answer = httpx.post(
        f"{service.url}/v1/chat/completions",
        headers={"authorization": f"Bearer {service.keys.acme}"},
        json={"model": "tiny", "messages": HELLO, "stream": True},
    )
    *_, last, rest = answer.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "worker_lost"
    assert rest == "" and "[DONE]" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.WORKER_LOST, 503),
        (ErrorCode.OVERLOADED, 503),
        (ErrorCode.DRAINING, 503),
        (ErrorCode.ADAPTER_UNAVAILABLE, 503),
        (ErrorCode.MODEL_UNKNOWN, 503),
        (ErrorCode.PROMPT_TOO_LONG, 400),
        (ErrorCode.INVALID, 400),
        (ErrorCode.LOGITS_NAN, 500),
        (ErrorCode.INTERNAL, 500),
    ],
)
def test_a_failure_before_the_first_token_is_a_status(
    client: openai.OpenAI, worker: ScriptedWorker, stream: bool, code: ErrorCode, status: int
) -> None:
    worker.script = fails_after("", code)
    with pytest.raises(openai.APIStatusError) as failure:
        client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
    assert failure.value.status_code == status
    assert ("retry-after-ms" in failure.value.response.headers) == (status == 503)


def test_an_abort_by_the_worker_is_no_end(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        yield SequenceOutput(id=request.id, tokens=ids("x"))
        yield SequenceOutput(id=request.id, tokens=[], finish_reason=FinishReason.ABORT)

    worker.script = script
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))


def test_framing(service: Service, worker: ScriptedWorker) -> None:
    worker.script = say('quote " and\nline\u2028', per_step=3)
    answer = httpx.post(
        f"{service.url}/v1/chat/completions",
        headers={"authorization": f"Bearer {service.keys.acme}"},
        json={"model": "tiny", "messages": HELLO, "stream": True},
    )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all(event.startswith("data: {") and "\n" not in event for event in events[:-2])
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in parsed)
    assert text == 'quote " and\nline\u2028'


def test_one_write_for_each_step(service: Service, worker: ScriptedWorker) -> None:
    """The head apart, each HTTP chunk holds what one step gave."""
    worker.script = say("abcd", per_step=2, pause_s=0.05)
    received = b""
    with raw_request(service, {"stream": True}) as connection:
        while b"[DONE]" not in received:
            received += connection.recv(65536)
    body = received.partition(b"\r\n\r\n")[2]
    chunks = body.split(b"\r\n")[1::2]
    contents = [chunk.count(b'"content":"') for chunk in chunks]
    # The role and the first step; the second; the end of turn, which says the reason; [DONE].
    assert contents[:3] == [2, 1, 0] and b'"finish_reason":"stop"' in chunks[2]
    assert b"[DONE]" in b"".join(chunks[2:])


def test_silence_is_filled_with_pings(impatient: Service) -> None:
    impatient.worker.script = say("ab", pause_s=0.7)
    with impatient.client() as client:
        chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "ab"
    with raw_request(impatient, {"stream": True}) as connection:
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(65536)
    assert received.count(b"\r\n8\r\n: ping\n\n\r\n") >= 2


@pytest.mark.parametrize("pause_s", [0.0, 0.7])
def test_nobody_watches_a_stream_that_has_ended(
    impatient: Service, pause_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it was pinged before or not."""
    impatient.worker.script = say("a", pause_s=pause_s)
    tasks = impatient.call(lambda: len(asyncio.all_tasks()))
    with impatient.client() as client:
        for _ in range(3):
            list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    time.sleep(0.5)
    impatient.wait_for(lambda: impatient.call(lambda: len(asyncio.all_tasks())) <= tasks)
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []


def test_an_error_after_a_ping_is_an_event(impatient: Service) -> None:
    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        await asyncio.sleep(0.5)
        raise WorkerFailed(ErrorCode.WORKER_LOST, "The worker is gone.")
        yield

    impatient.worker.script = script
    with impatient.client() as client, pytest.raises(openai.APIError, match="gone") as failure:
        list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    assert failure.value.code == "worker_lost"


def test_a_client_that_does_not_read_is_cut(impatient: Service) -> None:
    async def flood(request: Generate) -> AsyncIterator[SequenceOutput]:
        while True:
            await asyncio.sleep(0)
            yield SequenceOutput(id=request.id, tokens=ids("x" * 50_000))

    impatient.worker.script = flood
    before = len(impatient.worker.requests)
    with raw_request(impatient, {"stream": True}, receive_buffer=4096):
        assert_all_freed(impatient, impatient.worker, before)
