"""A worker that is lost, refuses, hangs or is short of room: where its requests go, how often."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from gateway.dispatch.failover import FLOOR, FullQueues
from tests.gateway.dispatch.test_fleet import SEVEN, catalog, serve
from tests.gateway.scripts import IM_END, Script, ids, say, silence
from tests.gateway.service import Service
from tests.scripted_worker import DIGEST, MAX_MODEL_LEN, ScriptedWorker
from workers.wire.client import WorkerFailed
from workers.wire.protocol import (
    ErrorCode,
    FinishReason,
    Generate,
    ModelInfo,
    SequenceOutput,
)

TEXT = "the quick brown fox"


def recite(pause_s: float = 0.0, first: int | None = None) -> Script:
    """Says `TEXT`, from where the request has come to. first: tokens of a request that was not
    resumed, which is silent after them."""

    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        wanted = [*ids(TEXT), IM_END]
        for index in range(request.num_resumed, len(wanted)):
            is_silent = index == first and not request.num_resumed
            await asyncio.sleep(3600 if is_silent else pause_s if index else 0)
            is_last = index == len(wanted) - 1
            yield SequenceOutput(
                id=request.id,
                tokens=[wanted[index]],
                finish_reason=FinishReason.STOP if is_last else None,
                stop_token=IM_END if is_last else None,
                num_cached_tokens=5 if request.num_resumed else 2,
            )

    return script


def refuse(code: ErrorCode, retry_after_s: float = 0.0, pace_s: float = 0.0) -> Script:
    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        raise WorkerFailed(code, "as the script says", retry_after_s, pace_s)
        yield

    return script


class Trio(Service):
    """Three workers with one script at first."""

    def __init__(self, store: Path) -> None:
        super().__init__(store, num_workers=3, failover_wait_s=5)

    def script(self, script: Script) -> None:
        for worker in self.workers:
            worker.script = script

    @property
    def num_sent(self) -> list[int]:
        return sorted(len(worker.requests) for worker in self.workers)

    def holder(self) -> ScriptedWorker:
        """The worker that has the only request."""
        self.wait_for(lambda: any(worker.requests for worker in self.workers))
        (holder,) = [worker for worker in self.workers if worker.requests]
        return holder

    def others(self, worker: ScriptedWorker) -> list[ScriptedWorker]:
        return [each for each in self.workers if each is not worker]

    def stop_worker(self, worker: ScriptedWorker) -> None:
        self.await_in_loop(worker.stop)

    def ask(self, **fields: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys.acme}", **fields.pop("headers", {})}
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 40, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60)


@pytest.fixture
def trio(store: Path) -> Iterator[Trio]:
    trio = Trio(store)
    trio.start()
    trio.wait_for(lambda: all(client.is_ready for client in trio.gateway.fleet.clients))
    yield trio
    trio.wait_for(lambda: trio.gateway.admission.num_open == 0)
    trio.stop()


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def asked(trio: Trio, background: ThreadPoolExecutor, **fields: Any) -> Future[httpx.Response]:
    return background.submit(lambda: trio.ask(**fields))


@pytest.mark.parametrize("stream", [True, False])
def test_before_its_first_token_a_request_is_sent_again(
    trio: Trio, background: ThreadPoolExecutor, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trio.script(silence)
    answer = asked(trio, background, stream=stream)
    lost = trio.holder()
    for other in trio.others(lost):
        other.script = say("here")
    with caplog.at_level(logging.INFO, "gateway"):
        trio.stop_worker(lost)
        found = answer.result()
        # The line is written when all has been sent.
        trio.wait_for(lambda: "answered" in caplog.messages)
    assert found.status_code == 200 and trio.num_sent == [0, 1, 1]
    text = found.text if stream else found.json()["choices"][0]["text"]
    assert text.endswith("data: [DONE]\n\n") if stream else text == "here"
    assert trio.gateway.failover.num_retried == 1 and trio.gateway.failover.num_resumed == 0
    (second,) = [worker for worker in trio.others(lost) if worker.requests]
    first = lost.requests[0]
    timeout_s = second.requests[0].timeout_s
    assert timeout_s is not None and first.timeout_s is not None
    assert 0 < timeout_s < first.timeout_s <= trio.config.request_timeout_s
    assert second.requests[0].waited_s > 0.0 == first.waited_s
    resent = msgspec.structs.replace(
        second.requests[0], id=first.id, timeout_s=first.timeout_s, waited_s=0.0
    )
    assert resent == first
    (line,) = [record for record in caplog.records if record.message == "answered"]
    assert line.__dict__["worker"] == second.instance_id
    assert line.__dict__["request_id"] == found.headers["x-request-id"]
    moved = f"{found.headers['x-request-id']} moved to worker {second.instance_id}"
    assert moved in caplog.messages
    if not stream:
        assert found.headers["loraplex-worker"] == lost.instance_id, (
            "it was told when it was chosen"
        )


@pytest.mark.parametrize("n", [1, 3])
def test_after_tokens_it_is_resumed_where_it_was(trio: Trio, n: int) -> None:
    trio.script(recite(0.02, first=7))
    text = [""] * n
    usage, lost = None, None
    with trio.client() as client:
        stream = client.completions.create(
            model="tiny",
            prompt="Hi",
            max_tokens=40,
            stream=True,
            n=n,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                text[choice.index] += choice.text
            usage = chunk.usage or usage
            if lost is None and all(len(each) == 7 for each in text):
                lost = next(worker for worker in trio.workers if worker.requests)
                trio.stop_worker(lost)
    assert text == [TEXT] * n and lost is not None
    assert usage is not None and usage.completion_tokens == n * (len(TEXT) + 1)
    assert usage.prompt_tokens == 2
    assert usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens == 2
    resumed = [r for worker in trio.workers for r in worker.requests if r.num_resumed]
    assert len(resumed) == n == trio.gateway.failover.num_resumed
    for request in resumed:
        first = next(r for r in lost.requests if r.params.choice == request.params.choice)
        generated = request.tokens[len(first.tokens) :]
        assert request.tokens[: len(first.tokens)] == first.tokens
        assert generated == ids(TEXT)[: request.num_resumed] and request.timeout_s is None
        assert request.params == first.params


def test_prompt_logprobs_that_have_come_are_not_asked_for_again(
    trio: Trio, background: ThreadPoolExecutor
) -> None:
    async def one_token(request: Generate) -> AsyncIterator[SequenceOutput]:
        async for output in say("ab")(request):
            yield output
            has_begun.set()
            await asyncio.sleep(60)

    has_begun = threading.Event()
    trio.script(one_token)
    answer = asked(trio, background, echo=True, logprobs=0, max_tokens=3)
    lost = trio.holder()
    for other in trio.others(lost):
        other.script = refuse(ErrorCode.INTERNAL)
    assert has_begun.wait(20)
    trio.stop_worker(lost)
    assert answer.result().status_code == 500
    (request,) = [r for worker in trio.others(lost) for r in worker.requests]
    assert request.num_resumed == 1 and request.params.prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_scoring_choice_that_is_lost_scores_elsewhere_for_all(
    trio: Trio, background: ThreadPoolExecutor, stream: bool
) -> None:
    """The others have waited for it, and follow it."""
    trio.script(silence)
    answer = asked(trio, background, n=3, echo=True, logprobs=0, max_tokens=3, stream=stream)
    lost = trio.holder()
    for other in trio.others(lost):
        other.script = say("ab")
    trio.stop_worker(lost)
    assert answer.result().status_code == 200
    assert answer.result().text.replace(" ", "").count('"token_logprobs":[null,-0.5,-0.5') == 3
    assert len(lost.requests) == 1 and trio.num_sent == [0, 1, 3]
    (heir,) = [worker for worker in trio.others(lost) if worker.requests]
    assert [r.params.prompt_logprobs for r in heir.requests] == [0, None, None]
    assert [r.params.choice for r in heir.requests] == [0, 1, 2]


@pytest.mark.parametrize("code", [ErrorCode.DRAINING, ErrorCode.MODEL_UNKNOWN])
def test_a_refusal_costs_no_retry(trio: Trio, code: ErrorCode) -> None:
    for worker, script in zip(trio.workers, (refuse(code), refuse(code), say("here")), strict=True):
        worker.script = script
    for _ in range(FLOOR // 4):
        assert trio.ask().json()["choices"][0]["text"] == "here"
    assert trio.gateway.failover.budget.has_room
    assert all(trio.gateway.failover.budget.take() for _ in range(FLOOR))


def test_an_overloaded_worker_s_request_tries_one_other_and_is_told_when_to_come_back(
    trio: Trio,
) -> None:
    trio.script(refuse(ErrorCode.OVERLOADED, retry_after_s=7.25))
    answer = trio.ask()
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "overloaded"
    assert answer.headers["retry-after"] == "8" and answer.headers["retry-after-ms"] == "7250"
    assert trio.num_sent == [0, 1, 1]


def test_what_one_worker_has_no_room_for_another_gets_with_the_wait_so_far(trio: Trio) -> None:
    """However many there are: the budget is for what may have harmed a worker."""

    async def is_late(request: Generate) -> AsyncIterator[SequenceOutput]:
        await asyncio.sleep(0.2)
        raise WorkerFailed(ErrorCode.OVERLOADED, "a first token would take too long", 1.0)
        yield

    trio.script(say("here"))
    full = trio.workers[0]
    full.script = is_late
    while trio.gateway.failover.budget.take():
        pass
    while len(full.requests) < 3:
        assert trio.ask().json()["choices"][0]["text"] == "here"
    for late in full.requests:
        times = [r.waited_s for w in trio.others(full) for r in w.requests if same(r, late)]
        assert late.waited_s == 0.0 and len(times) == 1 and times[0] > 0.1


def same(one: Generate, other: Generate) -> bool:
    """Whether two workers were sent one request."""
    return one.request_id == other.request_id


def second_choice_is_refused(
    code: ErrorCode, until: threading.Event, retry_after_s: float = 0.0
) -> tuple[Script, list[float]]:
    """The first choice goes on until the second has its text. When the second was asked for."""
    asked_at: list[float] = []

    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        if request.params.choice == 0:
            yield SequenceOutput(id=request.id, tokens=ids("a"))
            while not until.is_set():
                await asyncio.sleep(0.02)
            async for output in say("b")(request):
                yield output
            return
        asked_at.append(time.monotonic())
        await asyncio.sleep(0.1)
        if not until.is_set():
            raise WorkerFailed(code, "as the script says", retry_after_s)
        async for output in say("here")(request):
            yield output

    return script, asked_at


@pytest.mark.parametrize("code", [ErrorCode.OVERLOADED, ErrorCode.MODEL_UNAVAILABLE])
def test_a_choice_without_room_waits_while_another_of_its_request_has_begun(
    trio: Trio, background: ThreadPoolExecutor, code: ErrorCode
) -> None:
    """And comes back to each worker when it has been told to, not before."""
    has_room = threading.Event()
    script, asked_at = second_choice_is_refused(code, has_room, retry_after_s=2.0)
    trio.script(script)
    answer = asked(trio, background, n=2)
    trio.wait_for(lambda: len(asked_at) == 4)
    assert asked_at[3] - asked_at[0] >= 2.0, "each of the three has refused it until then"
    has_room.set()
    assert [c["text"] for c in answer.result().json()["choices"]] == ["ab", "here"]


def test_a_worker_that_refused_is_asked_again_after_a_second(
    trio: Trio, background: ThreadPoolExecutor
) -> None:
    has_room = threading.Event()
    script, asked_at = second_choice_is_refused(ErrorCode.DRAINING, has_room)
    trio.script(script)
    answer = asked(trio, background, n=2)
    trio.wait_for(lambda: len(asked_at) == 4)
    has_room.set()
    assert [c["text"] for c in answer.result().json()["choices"]] == ["ab", "here"]
    assert asked_at[3] - asked_at[0] >= 1.0


@pytest.mark.parametrize(("code", "waits"), [("draining", True), ("overloaded", False)])
def test_who_waits_for_a_worker_in_vain_ends_with_what_failed_it(
    store: Path, code: str, waits: bool
) -> None:
    """A full queue is nothing to wait for."""
    with Service(store, num_workers=1, failover_wait_s=2.0) as service:
        service.worker.script = refuse(ErrorCode(code))
        body = {"model": "tiny", "prompt": "Hi"}
        began = time.monotonic()
        answer = service.post("/v1/completions", body)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == code
        assert (time.monotonic() - began >= 2.0) == (len(service.worker.requests) > 1) == waits


def test_workers_that_just_refused_for_want_of_room_are_not_asked_again_at_once(
    trio: Trio,
) -> None:
    trio.gateway.failover.full = FullQueues(lambda: 100.0)
    trio.script(refuse(ErrorCode.OVERLOADED, retry_after_s=2.0, pace_s=0.2))
    while min(trio.num_sent) == 0:
        assert trio.ask().status_code == 503
    assert trio.num_sent == [1, 1, 1], "one that has refused is no other to try"
    num_sent = sum(trio.num_sent)
    answers = [trio.ask() for _ in range(3)]
    assert [answer.status_code for answer in answers] == [503] * 3
    told = [int(answer.headers["retry-after-ms"]) for answer in answers]
    assert sum(trio.num_sent) == num_sent and told == sorted(told) and told[0] > 2000
    assert {answer.json()["error"]["code"] for answer in answers} == {"overloaded"}
    assert trio.gateway.admission.num_open == 0
    trio.script(say("here"))
    assert trio.ask(prompt="H").status_code == 200, "it is smaller than what was refused"
    assert trio.ask().status_code == 200, "an answer has ended at one of them"
    assert trio.ask().json()["choices"][0]["text"] == "here"


def test_what_no_worker_began_costs_nothing(trio: Trio) -> None:
    trio.script(refuse(ErrorCode.EXPIRED))
    answer = trio.ask()
    assert answer.status_code == 504 and answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert trio.num_sent == [0, 0, 1]


def test_a_request_that_kills_its_workers_is_refused_by_name(trio: Trio) -> None:
    def killer(worker: ScriptedWorker) -> Script:
        async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
            stopping.append(asyncio.create_task(worker.stop()))
            await asyncio.sleep(60)
            yield SequenceOutput(id=request.id, tokens=[])

        return script

    stopping: list[asyncio.Task[None]] = []
    for worker in trio.workers:
        worker.script = killer(worker)
    answer = trio.ask()
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "poison_request"
    assert answer.headers["x-should-retry"] == "false"
    assert trio.num_sent == [0, 1, 1] and trio.gateway.failover.num_poisonous == 1


def one_each(num_workers: int) -> Script:
    """Recites, but the first so many workers say one token and no more."""

    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        async for output in recite()(request):
            yield output
            if request.num_resumed < num_workers:
                await asyncio.sleep(60)

    return script


def losing(trio: Trio, num_losses: int) -> Iterator[ScriptedWorker]:
    """Asks, and as soon as there is a token stops the worker that it is of, so many times. The
    answer is whole in the end."""
    trio.script(one_each(num_losses))
    with trio.client() as client:
        stream = client.completions.create(model="tiny", prompt="Hi", max_tokens=40, stream=True)
        text = ""
        for number, chunk in enumerate(stream):
            text += chunk.choices[0].text
            if number < num_losses:
                (worker,) = [
                    w for w in trio.workers if w.requests and w.requests[-1].num_resumed == number
                ]
                trio.stop_worker(worker)
                yield worker
    assert text == TEXT


def test_who_gets_on_with_each_worker_is_not_the_cause_of_their_loss(trio: Trio) -> None:
    assert len(set(losing(trio, 2))) == 2
    assert trio.gateway.failover.num_poisonous == 0


def test_who_has_got_on_may_wait_for_as_long_again(trio: Trio) -> None:
    for other in trio.workers[1:]:
        trio.stop_worker(other)
    trio.wait_for(lambda: sum(client.is_ready for client in trio.gateway.fleet.clients) == 1)
    wait_s = trio.gateway.failover.wait_s
    for worker in losing(trio, 2):
        time.sleep(0.6 * wait_s)
        trio.await_in_loop(worker.start)


def test_who_was_refused_for_want_of_room_waits_when_the_next_worker_is_lost(trio: Trio) -> None:
    def script(worker: ScriptedWorker) -> Script:
        async def run(request: Generate) -> AsyncIterator[SequenceOutput]:
            asked_of.append(worker)
            if len(asked_of) == 1:
                raise WorkerFailed(ErrorCode.OVERLOADED, "full")
            if len(asked_of) == 2:
                stopping.append(asyncio.create_task(worker.stop()))
                await asyncio.sleep(60)
            async for output in say("here")(request):
                yield output

        return run

    asked_of: list[ScriptedWorker] = []
    stopping: list[asyncio.Task[None]] = []
    trio.stop_worker(trio.workers[2])
    trio.wait_for(lambda: sum(client.is_ready for client in trio.gateway.fleet.clients) == 2)
    for worker in trio.workers:
        worker.script = script(worker)
    assert trio.ask().json()["choices"][0]["text"] == "here"
    first, second, last = asked_of
    assert first is last is not second


def test_retries_end_with_their_budget(trio: Trio, background: ThreadPoolExecutor) -> None:
    trio.script(silence)
    while trio.gateway.failover.budget.take():
        pass
    answer = asked(trio, background)
    trio.stop_worker(trio.holder())
    assert answer.result().status_code == 503
    assert answer.result().json()["error"]["code"] == "worker_lost"
    assert trio.num_sent == [0, 0, 1]


def test_without_another_worker_it_waits_for_one(
    trio: Trio, background: ThreadPoolExecutor
) -> None:
    trio.script(recite(0.05))
    answer = asked(trio, background)
    holder = trio.holder()
    trio.wait_for(lambda: bool(holder.requests))
    for other in trio.others(holder):
        trio.stop_worker(other)
    trio.stop_worker(holder)
    trio.await_in_loop(holder.start)
    assert answer.result().json()["choices"][0]["text"] == TEXT


def test_a_hung_worker_s_requests_leave_it_and_it_is_taken_back(
    trio: Trio, background: ThreadPoolExecutor
) -> None:
    trio.script(silence)
    answer = asked(trio, background)
    hung = trio.holder()
    for other in trio.others(hung):
        other.script = recite()
    hung.step_age_s = 61.0
    assert answer.result().json()["choices"][0]["text"] == TEXT
    trio.wait_for(lambda: hung.aborted == hung.requests)
    hung.script = recite()
    for _ in range(10):
        assert trio.ask().status_code == 200
    assert len(hung.requests) == 1
    hung.step_age_s = 0.0

    def is_back() -> bool:
        assert trio.ask().status_code == 200
        return len(hung.requests) > 1

    trio.wait_for(is_back)


def test_where_all_workers_hang_requests_wait(trio: Trio, background: ThreadPoolExecutor) -> None:
    trio.script(recite(0.2))
    for worker in trio.workers:
        worker.step_age_s = 61.0
    trio.wait_for(lambda: all(client.is_silent for client in trio.gateway.fleet.clients))
    assert trio.ask().json()["choices"][0]["text"] == TEXT
    assert trio.num_sent == [0, 0, 1]


def test_the_adapter_is_as_the_next_worker_must_have_it(
    trio: Trio, background: ThreadPoolExecutor
) -> None:
    serve(trio, catalog(trio, 2))
    trio.script(silence)
    answer = asked(trio, background, model="support-bot")
    lost = trio.holder()
    # The others come back with images of another layout.
    for other in trio.others(lost):
        trio.stop_worker(other)
        other.models = [ModelInfo(DIGEST, "tiny", MAX_MODEL_LEN, "another layout")]
        other.script = say("here")
        trio.await_in_loop(other.start)
    trio.wait_for(lambda: all(client.is_ready for client in trio.gateway.fleet.clients))
    trio.stop_worker(lost)
    assert answer.result().status_code == 200
    (second,) = [r for worker in trio.others(lost) for r in worker.requests]
    first = lost.requests[0]
    assert first.adapter and (first.adapter.digest, first.adapter.checksum) == (SEVEN, "c" * 64)
    assert second.adapter and (second.adapter.digest, second.adapter.checksum) == (SEVEN, "d" * 64)


@pytest.mark.parametrize("stream", [True, False])
def test_the_caller_s_deadline_ends_the_wait_for_the_first_token(trio: Trio, stream: bool) -> None:
    trio.script(silence)
    answer = trio.ask(stream=stream, headers={"x-request-timeout": "0.4"})
    assert answer.status_code == 504 and answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    holder = trio.holder()
    (request,) = holder.requests
    assert request.timeout_s is not None and 0 < request.timeout_s <= 0.4
    trio.wait_for(lambda: holder.aborted == [request])


def test_the_deadline_is_of_the_first_token_alone(trio: Trio) -> None:
    trio.script(recite(0.06))
    answer = trio.ask(headers={"x-request-timeout": "1"})
    assert answer.json()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("given", ["", "0", "-1", "nan", "1e3", "soon", "86401", "1_0", "٣"])
def test_a_bad_deadline_is_refused_by_name(trio: Trio, given: str) -> None:
    answer = trio.ask(headers={"x-request-timeout": given.encode()})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-request-timeout"
    assert trio.num_sent == [0, 0, 0]


def test_the_official_client_does_not_repeat_what_is_final(trio: Trio) -> None:
    trio.script(silence)
    with trio.client(max_retries=3) as client, pytest.raises(openai.InternalServerError) as failure:
        client.completions.create(
            model="tiny", prompt="Hi", extra_headers={"x-request-timeout": "0.3"}
        )
    assert failure.value.status_code == 504 and trio.num_sent == [0, 0, 1]
