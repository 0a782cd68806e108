"""A receiver of OTLP over HTTP that keeps the spans it is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

WAIT_S = 20.0


class ReceivedEvent(msgspec.Struct, frozen=True):
    name: str
    time_ns: int
    attributes: dict[str, Any]


class ReceivedSpan(msgspec.Struct, frozen=True):
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it has none."""
    name: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[ReceivedEvent]
    is_error: bool
    service: str


class OtlpReceiver:
    """`spans` are all that have come, in no order."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_port}"
        self.spans: list[ReceivedSpan] = []
        self.bodies: list[bytes] = []
        """Of the requests, as they came."""
        self._changed = threading.Condition()

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.bodies.append(body)
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_span(span, service) for span in scope.spans]
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """All spans, once the condition holds of them."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.spans), WAIT_S), self.spans
            return list(self.spans)

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of a trace whose request's span, which is the last to end, has come."""

        def is_whole(spans: list[ReceivedSpan]) -> bool:
            return any(span.trace_id == trace_id and span.kind == SERVER for span in spans)

        return [span for span in self.wait_for(is_whole) if span.trace_id == trace_id]


SERVER = 2
"""The kind of a span for a request that was received."""


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            receiver.take(body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = OtlpReceiver(server)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield receiver
        server.shutdown()
        thread.join()


def _span(span: Any, service: str) -> ReceivedSpan:
    return ReceivedSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=[
            ReceivedEvent(event.name, event.time_unix_nano, _attributes(event.attributes))
            for event in span.events
        ],
        is_error=span.status.code == 2,
        service=service,
    )


def _attributes(given: Any) -> dict[str, Any]:
    pairs: list[KeyValue] = list(given)
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
