"""Traces of a real gateway over HTTP, as a real OTLP receiver gets them."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway.exceptions import TooManyRefusals
from gateway.tracing import MAX_KEPT_PER_S, Tracing
from tests.gateway.scripts import Script, endless, ids, say, silence
from tests.gateway.service import Service
from tests.otlp_receiver import SERVER, OtlpReceiver, ReceivedSpan
from tests.scripted_worker import ScriptedWorker
from tests.tracing import CLIENT_SPAN, SLOW_S, TRACE_ID, traced
from tools.source_tree import ROOT
from workers.wire.client import WorkerFailed
from workers.wire.protocol import AdapterLoadTimes, ErrorCode, Generate, SequenceTimes
from workers.wire.protocol import SequenceOutput as Output

MAX_SPANS = 12
"""Of one request, whatever its length."""
SECRET = "my parcel is orange"


class Traced(Service):
    """A gateway that is traced, with two workers."""

    def __init__(self, store: Path, tracing: Tracing, receiver: OtlpReceiver) -> None:
        super().__init__(store, num_workers=2, tracing=tracing, failover_wait_s=5)
        self.receiver = receiver

    def ask(
        self,
        model: str = "support-bot",
        *,
        parent: str | None = None,
        state: str = "vendor=1",
        **fields: Any,
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {fields.pop('key', self.keys.acme)}"}
        if parent is not None:
            headers |= {"traceparent": parent, "tracestate": state}
        body = {"model": model, "prompt": SECRET, "max_tokens": 40, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60)

    def script(self, script: Script) -> None:
        for worker in self.workers:
            worker.script = script

    def trace_of(self, response: httpx.Response) -> list[ReceivedSpan]:
        """Of a request that came without a trace."""
        return self.receiver.trace(response.headers["x-request-id"].removeprefix("req_"))


@pytest.fixture(scope="module")
def service(store: Path) -> Iterator[Traced]:
    with traced() as (tracing, receiver):
        service = Traced(store, tracing, receiver)
        service.start()
        service.wait_for(lambda: all(client.is_ready for client in service.gateway.fleet.clients))
        yield service
        service.stop()


def timed(script: Script, told: Callable[[float], SequenceTimes]) -> Script:
    """The script of a worker that tells its times. told: from the seconds since the request came
    to what is told then."""

    async def timed_script(request: Generate) -> AsyncIterator[Output]:
        begun = time.perf_counter()
        is_first = True
        async for output in script(request):
            if is_first or output.finish_reason is not None:
                now = time.perf_counter() - begun
                output = msgspec.structs.replace(output, times=told(now))
            is_first = False
            yield output

    return timed_script


async def fails(request: Generate) -> AsyncIterator[Output]:
    raise WorkerFailed(ErrorCode.INTERNAL, "as the script says")
    yield


def all_stages(now: float) -> SequenceTimes:
    load = AdapterLoadTimes("disk", 0.0, 0.002, 0.001, 2)
    return SequenceTimes(now, 0.003, 0.004, (0.0, 0.001), load, [0.005], 1)


def parent(flags: str = "01", trace_id: str = TRACE_ID) -> str:
    return f"00-{trace_id}-{CLIENT_SPAN}-{flags}"


def by_name(spans: list[ReceivedSpan]) -> dict[str, ReceivedSpan]:
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


def request_span(spans: list[ReceivedSpan]) -> ReceivedSpan:
    (span,) = [span for span in spans if span.kind == SERVER]
    return span


@pytest.mark.parametrize(
    ("number", "state", "shown"),
    [
        (1, "vendor=1,other=2", b"vendor=1,other=2"),
        (2, f"{SECRET} is no list", b""),
        (3, f"a={SECRET}=", b""),
        (4, f"a={SECRET},a={SECRET}", b""),
        (5, ",".join(f"k{i}={SECRET}" for i in range(33)), b""),
    ],
)
def test_the_clients_state_is_passed_on_if_it_is_one_and_never_logged(
    service: Traced, caplog: pytest.LogCaptureFixture, number: int, state: str, shown: bytes
) -> None:
    caplog.set_level(logging.DEBUG)
    service.script(say("it is here"))
    trace_id = f"{number}b" * 16
    assert service.ask(parent=parent(trace_id=trace_id), state=state).status_code == 200
    assert service.receiver.trace(trace_id)
    (body,) = [each for each in service.receiver.bodies if bytes.fromhex(trace_id) in each]
    assert (shown in body) if shown else (SECRET.encode() not in body)
    assert SECRET not in caplog.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_is_one_trace_of_the_client(
    service: Traced, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO)
    trace_id = f"{int(stream):032x}".replace("0", "a")
    service.script(timed(say("it is here", pause_s=0.002), all_stages))
    response = service.ask(parent=parent(trace_id=trace_id), stream=stream, temperature=0.5)
    assert response.status_code == 200
    spans = by_name(service.receiver.trace(trace_id))
    assert {span.service for span in spans.values()} == {"loraplex-gateway"}
    request = spans.pop("POST /v1/completions")
    assert request.parent_id == CLIENT_SPAN
    below = {name: span for name, span in spans.items() if span.parent_id == request.span_id}
    assert sorted(below) == ["catalog", "limits", "routing", "stream", "tokenise", "usage"]
    told = {name for name, span in spans.items() if span.parent_id == spans["stream"].span_id}
    assert told == {"queue", "model_swap", "adapter_load", "prefill", "decode"}
    assert len(spans) == len(below) + len(told) < MAX_SPANS
    assert_inside(below.values(), request)
    assert_inside([spans[name] for name in told], spans["stream"])
    assert spans["adapter_load"].attributes["loraplex.adapter.tier"] == "disk"
    assert [event.name for event in request.events] == [
        "body_read",
        "preemption",
        "eviction",
    ]
    assert request.events[-1].attributes["loraplex.adapters.evicted"] == 2
    assert_says(
        request,
        {
            "http.response.status_code": 200,
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": "support-bot",
            "gen_ai.request.temperature": 0.5,
            "gen_ai.usage.input_tokens": len(SECRET),
            "gen_ai.usage.output_tokens": 11,
            "gen_ai.response.finish_reasons": ["stop"],
            "loraplex.tenant.id": "ten_acme",
            "loraplex.adapter.version": 7,
            "loraplex.outcome": "completed",
            "loraplex.request.id": response.headers["x-request-id"],
        },
    )
    sent = next(each for worker in service.workers for each in reversed(worker.requests))
    assert sent.traceparent is not None
    assert trace_id in sent.traceparent and request.span_id in sent.traceparent
    line = line_of(response, caplog)
    assert (line["trace_id"], line["outcome"], line["error"]) == (trace_id, "completed", None)


def line_of(response: httpx.Response, caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """The only one of the request. It is written when all of the answer has been sent."""
    request_id = response.headers["x-request-id"]

    def lines() -> list[dict[str, Any]]:
        told = [record.__dict__ for record in caplog.records if record.msg == "answered"]
        return [each for each in told if each["request_id"] == request_id]

    Service.wait_for(lambda: bool(lines()))
    (line,) = lines()
    return line


def test_the_line_of_a_request_that_failed_says_so(
    service: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    service.script(fails)
    response = service.ask()
    assert response.status_code == 500
    line = line_of(response, caplog)
    assert (line["outcome"], line["error"]) == ("failed", "internal_error")


def assert_inside(spans: Any, outer: ReceivedSpan) -> None:
    """Clocks are read twice for each time: a microsecond may lie between."""
    for span in spans:
        assert span.end_ns >= span.start_ns
        assert span.start_ns >= outer.start_ns - 1e5 and span.end_ns <= outer.end_ns + 1e5, span


def assert_says(span: ReceivedSpan, attributes: dict[str, Any]) -> None:
    assert {name: span.attributes.get(name) for name in attributes} == attributes


def test_without_a_trace_of_the_client_the_requests_id_is_the_trace(service: Traced) -> None:
    service.script(say("it is here"))
    request = request_span(service.trace_of(service.ask()))
    assert request.parent_id == ""
    assert request_span(service.trace_of(service.ask(parent="no trace"))).parent_id == ""


class MovedOnce:
    """The first worker refuses the sequence after so many tokens, the second answers."""

    def __init__(self, service: Traced, num_before: int) -> None:
        self.workers: list[ScriptedWorker] = []
        self._num_before = num_before
        for worker in service.workers:
            worker.script = partial(self._run, worker)

    async def _run(self, worker: ScriptedWorker, request: Generate) -> AsyncIterator[Output]:
        self.workers.append(worker)
        if len(self.workers) == 1:
            for token in ids("it is here")[: self._num_before]:
                yield Output(request.id, [token])
            raise WorkerFailed(ErrorCode.DRAINING, "as the script says")
        async for output in timed(say("it is here"), all_stages)(request):
            yield output


@pytest.mark.parametrize("num_before", [0, 3])
def test_going_on_at_another_worker_is_an_event_of_the_one_trace(
    service: Traced, num_before: int
) -> None:
    moved = MovedOnce(service, num_before)
    spans = service.trace_of(service.ask(stream=True))
    first, second = moved.workers
    assert first is not second
    request = request_span(spans)
    (event,) = [event for event in request.events if event.name in ("retry", "resume")]
    assert event.name == ("resume" if num_before else "retry")
    assert event.attributes == {
        "loraplex.worker.from": first.instance_id,
        "loraplex.worker.to": second.instance_id,
        "error.type": "draining",
        "loraplex.tokens_resumed": num_before,
    }
    assert request.start_ns <= event.time_ns <= request.end_ns
    assert by_name(spans)["decode"].attributes["loraplex.worker"] == second.instance_id
    assert_says(request, {"loraplex.outcome": "completed", "loraplex.worker": second.instance_id})
    assert not any(span.is_error for span in spans)


@pytest.mark.parametrize("num_choices", [1, 8])
def test_the_number_of_spans_is_bounded(service: Traced, num_choices: int) -> None:
    service.script(timed(say("a" * 100), all_stages))
    response = service.ask(stream=True, max_tokens=100, n=num_choices)
    assert response.text.count("data: ") >= 100
    assert len(service.trace_of(response)) <= MAX_SPANS


def test_one_that_a_stop_string_ends_has_its_stages(service: Traced) -> None:
    """The worker is not heard to the end."""
    service.script(timed(endless(0.002), all_stages))
    response = service.ask(max_tokens=100, stop="aaaa")
    spans = by_name(service.trace_of(response))
    assert_inside([spans["decode"]], spans["stream"])
    assert spans["decode"].end_ns - spans["decode"].start_ns > 1e6


def test_what_the_sampler_drops_is_not_sent_unless_it_failed_or_was_slow(service: Traced) -> None:
    """The client's trace says that it is not sampled."""
    scripts = {
        1: (say("it is here"), {}),
        2: (fails, {"loraplex.kept": "error", "error.type": "internal_error"}),
        3: (say("it is here", pause_s=1.2 * SLOW_S, per_step=40), {"loraplex.kept": "slow"}),
    }
    for number, (script, _) in scripts.items():
        service.script(script)
        service.ask(parent=parent("00", f"{number:032x}"))
    for number in (2, 3):
        spans = service.receiver.trace(f"{number:032x}")
        request = request_span(spans)
        assert_says(request, scripts[number][1])
        assert {"catalog", "stream"} < {span.name for span in spans}
        assert request.is_error == (number == 2)
    assert not [span for span in service.receiver.spans if span.trace_id == f"{1:032x}"]


def test_of_many_that_fail_a_number_a_second_is_kept() -> None:
    tracing = Tracing()
    for now in (1.0, 2.5):
        kept = [tracing.may_keep(now + number / 1000) for number in range(100)]
        assert sum(kept) == MAX_KEPT_PER_S


def test_a_refused_request_says_why_and_is_no_error_of_ours(service: Traced) -> None:
    unknown = service.ask("no-such-model")
    assert unknown.status_code == 404
    (request, catalog) = sorted(service.trace_of(unknown), key=lambda span: span.kind)[::-1]
    assert catalog.is_error and not request.is_error
    assert_says(request, {"http.response.status_code": 404, "error.type": "model_not_found"})
    assert "gen_ai.request.model" not in request.attributes, "the client's words"
    too_long = service.ask(prompt="a " * 500)
    spans = service.trace_of(too_long)
    assert [span.name for span in spans if span.is_error] == ["tokenise"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/models/support-bot", None, 200),
        ("GET", "/v1/models/nowhere", None, 404),
        ("POST", "/tokenize", {"model": "tiny", "prompt": SECRET}, 200),
        ("POST", "/tokenize", {"model": "tiny"}, 400),
    ],
)
def test_requests_that_no_worker_runs_are_traced(
    service: Traced, method: str, path: str, body: dict[str, Any] | None, status: int
) -> None:
    headers = {"authorization": f"Bearer {service.keys.acme}"}
    answer = httpx.request(method, f"{service.url}{path}", json=body, headers=headers)
    assert answer.status_code == status
    (span,) = service.trace_of(answer)
    assert span.attributes["loraplex.tenant.id"] == "ten_acme"
    assert span.attributes["loraplex.tenant.name"] == "acme"
    assert span.attributes["http.response.status_code"] == status
    assert "nowhere" not in span.name and span.attributes["url.path"] == path
    assert ("error.type" in span.attributes) == (status >= 400)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_a_request_that_a_limit_refuses_is_traced(
    service: Traced, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def refuse(*_: object) -> None:
        raise TooManyRefusals(1.0)

    monkeypatch.setattr(service.gateway.refusals, "begin", refuse)
    answer = service.post(path, {})
    assert answer.status_code == 429
    span = request_span(service.trace_of(answer))
    assert span.attributes["loraplex.tenant.id"] == "ten_acme"
    assert span.attributes["error.type"] == "too_many_refusals"


def test_strangers_make_no_traces(service: Traced) -> None:
    response = service.ask(key=service.keys.unissued, parent=parent(trace_id="5" * 32))
    assert response.status_code == 401
    service.trace_of(service.ask())
    assert not [span for span in service.receiver.spans if span.trace_id == "5" * 32]


def test_a_client_that_leaves_is_told_as_such(service: Traced) -> None:
    service.script(silence)
    headers = {"authorization": f"Bearer {service.keys.acme}", "traceparent": parent()}
    body = json.dumps({"model": "support-bot", "prompt": SECRET, "stream": True})
    num_before = sum(len(worker.requests) for worker in service.workers)
    with closing(HTTPConnection("127.0.0.1", service.port)) as client:
        client.request("POST", "/v1/completions", body, headers)
        service.wait_for(
            lambda: sum(len(worker.requests) for worker in service.workers) == num_before + 1
        )
    request = request_span(service.receiver.trace(TRACE_ID))
    assert_says(request, {"loraplex.outcome": "cancelled"})
    assert not request.is_error


def test_prompts_and_answers_are_in_no_span(service: Traced) -> None:
    """Whatever was sent by the tests of this module so far, and one more."""
    service.script(say("the answer is blue"))
    service.trace_of(service.ask(stop=["a stop string"], user="a user"))
    sent = b"".join(service.receiver.bodies)
    assert b"support-bot" in sent
    for text in (SECRET, "the answer is blue", "a stop string", "a user", service.keys.acme):
        assert text.encode() not in sent


def test_the_table_of_names_is_what_is_sent(service: Traced) -> None:
    parameters = {
        "temperature": 0.5,
        "top_p": 0.5,
        "seed": 1,
        "n": 2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "top_k": 3,
    }
    service.script(timed(say("it is here"), all_stages))
    answers = [service.ask(**parameters)]
    for num_before in (0, 3):
        MovedOnce(service, num_before)
        answers.append(service.ask(stream=True))
    service.script(fails)
    answers.append(service.ask())
    sent: set[str] = set()
    for span in (span for answer in answers for span in service.trace_of(answer)):
        sent |= {span.name.replace("/v1/completions", "<route>"), *span.attributes}
        for event in span.events:
            sent |= {event.name, *event.attributes}
    page = (ROOT / "docs/operate/telemetry.md").read_text()
    documented = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert sorted(documented) == sorted(sent)


def test_without_tracing_workers_are_not_asked_for_times(store: Path) -> None:
    service = Service(store)
    service.start()
    headers = {"authorization": f"Bearer {service.keys.acme}", "traceparent": parent()}
    body = {"model": "support-bot", "prompt": "Hi", "max_tokens": 4}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    assert [request.traceparent for request in service.worker.requests] == [None]
    service.stop()
