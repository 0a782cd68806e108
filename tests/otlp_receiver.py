"""A receiver of OTLP over HTTP that keeps the spans and the figures it is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

WAIT_S = 60.0


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


class ReceivedPoint(msgspec.Struct, frozen=True):
    attributes: dict[str, Any]
    value: float
    """Of a histogram its sum."""
    counts: list[int] = []
    bounds: list[float] = []
    exemplars: dict[str, float] = {}
    """Values by trace id."""


class ReceivedMetric(msgspec.Struct, frozen=True):
    kind: str
    unit: str
    points: list[ReceivedPoint]


class OtlpReceiver:
    """`spans` are all that have come, in no order; `metrics` the last that each service has sent,
    by name."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_port}"
        self.spans: list[ReceivedSpan] = []
        self.metrics: dict[str, dict[str, ReceivedMetric]] = {}
        self.bodies: list[bytes] = []
        """Of the requests with spans, as they came."""
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

    def take_metrics(self, body: bytes) -> None:
        request = ExportMetricsServiceRequest.FromString(body)
        with self._changed:
            for resource in request.resource_metrics:
                service = _attributes(resource.resource.attributes)["service.name"]
                self.metrics[service] = {
                    metric.name: _metric(metric)
                    for scope in resource.scope_metrics
                    for metric in scope.metrics
                }
            self._changed.notify_all()

    def wait_for_metrics(
        self, condition: Callable[[dict[str, dict[str, ReceivedMetric]]], bool]
    ) -> dict[str, dict[str, ReceivedMetric]]:
        """By service and name, once the condition holds of them."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.metrics), WAIT_S), self.metrics
            return dict(self.metrics)

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
            take, response = {
                "/v1/traces": (receiver.take, ExportTraceServiceResponse),
                "/v1/metrics": (receiver.take_metrics, ExportMetricsServiceResponse),
            }[self.path]
            take(body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(response().SerializeToString())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = OtlpReceiver(server)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield receiver
        finally:
            # Of a test that failed, too: the thread would keep pytest from ending.
            server.shutdown()
            thread.join()


def _metric(metric: Any) -> ReceivedMetric:
    kind = metric.WhichOneof("data")
    return ReceivedMetric(
        kind, metric.unit, [_point(kind, point) for point in getattr(metric, kind).data_points]
    )


def _point(kind: str, point: Any) -> ReceivedPoint:
    attributes = _attributes(point.attributes)
    if kind != "histogram":
        return ReceivedPoint(attributes, getattr(point, point.WhichOneof("value")))
    assert point.count == sum(point.bucket_counts)
    assert not point.HasField("min") and not point.HasField("max")
    exemplars = {each.trace_id.hex(): each.as_double for each in point.exemplars}
    bounds, counts = list(point.explicit_bounds), list(point.bucket_counts)
    return ReceivedPoint(attributes, point.sum, counts, bounds, exemplars)


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
