"""Creates the spans of a request when the request has ended, from times that were recorded while it
ran.

Failed and slow requests can therefore be kept even if the sampler would drop them, and a dropped
request costs only the recording of times. The module uses only the OpenTelemetry API. The code that
starts the process sets up the SDK.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from litestar.types import Scope
from opentelemetry import context as context_api
from opentelemetry import trace as trace_api
from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
)

from store.records import Tenant
from web.request_head import find_header, find_headers

MAX_CHARS = 512
"""Maximum characters of a `tracestate` header. W3C asks servers to pass on at least this many.
Longer headers are dropped."""
MAX_MEMBERS = 32

_MEMBER = re.compile(
    r"([a-z0-9][a-z0-9_*/@-]{0,255})=([\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])"
)
"""Matches one member of the list in https://www.w3.org/TR/trace-context/#tracestate-header."""
_MULTI_TENANT = re.compile(r"[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13}")
REQUEST_IDS = "loraplex-request-ids"
"""Key in the OpenTelemetry context, set while a request's span is created. Its value is the (trace
id, span id) that the SDK's id generator must return for the span."""
KEPT = "loraplex.kept"
"""Attribute of a request's span that makes the sampler keep it. Its value is `error` or `slow`."""
MAX_KEPT_PER_S = 10
"""Maximum requests per second that are kept because they failed or were slow. They are limited
because all requests may be slow in an overload."""
MAX_EVENTS = 32
"""Maximum number of events of one request's span."""
OLDER_LATENCIES = {
    "queue": "gen_ai.latency.time_in_queue",
    "prefill": "gen_ai.latency.time_in_model_prefill",
    "decode": "gen_ai.latency.time_in_model_decode",
}
"""Attributes with which vLLM's request spans report durations, by the name of loraplex's stage."""
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})"
)
"""Matches a header as in https://www.w3.org/TR/trace-context/#traceparent-header."""
Value = str | int | float | bool | list[str] | list[float]
Attributes = Mapping[str, Value]


def read_trace_state(headers: Sequence[str]) -> TraceState:
    """Returns the contents of a request's `tracestate` headers. Returns an empty state if they are
    too long or invalid. The contents are never logged."""
    joined = ",".join(headers)
    members = [each.strip(" \t") for each in joined.split(",")]
    found = [_MEMBER.fullmatch(each) for each in members if each]
    entries = [(each[1], each[2]) for each in found if each is not None]
    keys = {key for key, _ in entries}
    is_valid = (
        len(joined) <= MAX_CHARS
        and len(found) <= MAX_MEMBERS
        and len(keys) == len(found)
        and all("@" not in key or _MULTI_TENANT.fullmatch(key) for key in keys)
    )
    return TraceState(entries if is_valid else [])


class Stage(NamedTuple):
    """Stage of a request, as reported by a worker. `begun_at` and `ended_at` are times of
    time.perf_counter()."""

    name: str
    begun_at: float
    ended_at: float
    attributes: Attributes


class Event(NamedTuple):
    name: str
    at: float
    attributes: Attributes


class Detail(NamedTuple):
    """Attributes, events and worker stages of a recorded request. Phases are recorded elsewhere."""

    attributes: Attributes
    events: list[Event]
    stages: list[Stage]
    """Stages at the worker, whose spans are children of the phase `stream`."""


NO_DETAIL = Detail({}, [], [])


class Untraced:
    """Trace of a request if tracing is off. Records nothing, and has only the client's trace id."""

    traceparent: str | None = None
    """Value of the header `traceparent` that is sent to the worker. None if tracing is off."""

    def __init__(self, client_trace_id: str | None = None) -> None:
        self.trace_id = client_trace_id
        self.tenant: Tenant | None = None
        """Tenant of the request. While it is None, `end` creates no spans."""
        self.model = ""
        """Model name in the request, set once the model is resolved."""
        self.first_output_at: float | None = None
        """Time of time.perf_counter() at which the first output arrived. None before that."""

    def enter(self, phase: str) -> None:
        """Begins a phase, which ends the previous one."""

    def annotate(self, attributes: Callable[[], Attributes]) -> None:
        """Adds attributes to the current phase. Calls the function only if a span is recorded."""

    def leave(self) -> None:
        """Ends the current phase without beginning another."""

    def drop_phases(self) -> None:
        """Drops the phases recorded so far. Called for requests that need no worker."""

    def event(self, name: str) -> None:
        """Adds an event with the current time to the request's span."""

    def fail(self, code: str) -> None:
        """Records that the request failed. `code` is the code of the error that the client gets.
        Only the first failure counts."""

    def detail(self, make: Callable[[], Detail]) -> None:
        """Sets the function that returns the `Detail`, which `end` calls if a span is recorded."""

    def when_kept(self, tell: Callable[[int, int], None]) -> None:
        """Sets the function that `end` calls with the trace id and the span id if the request is
        recorded."""

    def end(self, status: int | None) -> None:
        """Ends the trace. `status` is the HTTP status of the answer, or None if there was no
        answer."""


class Tracing:
    """Tracing of one gateway. Begins traces, and limits how many are kept in spite of the
    sampler."""

    def __init__(
        self,
        tracer: Tracer | None = None,
        *,
        slow_s: float = 10.0,
        has_older_names: bool = True,
    ) -> None:
        """`tracer` is None if tracing is off. A request is kept if it took `slow_s` seconds or more
        to its first token, or to its end if it has no token. `has_older_names` adds attributes with
        the names of older conventions."""
        self.tracer = tracer
        self.slow_s = slow_s
        self.has_older_names = has_older_names
        self._kept_since = 0.0
        self._num_kept = 0
        """Number of calls of `may_keep` in the second that began at `_kept_since`, including calls
        that returned False."""

    def begin(self, scope: Scope) -> Untraced:
        """Begins the trace of a request, which must have a request id. If the client sent no valid
        `traceparent`, the hex digits of the request id are the trace id."""
        traceparent = find_header(scope, b"traceparent")
        client = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent)
        if self.tracer is None:
            return Untraced(client and client[1])
        return RequestTrace(self, self.tracer, scope, client)

    def may_keep(self, now: float) -> bool:
        """Returns whether one more request may be kept now regardless of the sampler."""
        if now - self._kept_since >= 1.0:
            self._kept_since, self._num_kept = now, 0
        self._num_kept += 1
        return self._num_kept <= MAX_KEPT_PER_S


class RequestTrace(Untraced):
    """Recorder of one request's phases and events. `end` creates the spans.

    POST /v1/... = catalog | tokenise | routing | limits | stream ................... | usage |
                                                         | queue | prefill | decode |
    """

    def __init__(
        self,
        tracing: Tracing,
        tracer: Tracer,
        scope: Scope,
        client: re.Match[str] | None,
    ) -> None:
        """`client` is the match of the client's `traceparent`, or None if it sent none."""
        state: Mapping[str, Any] = scope["state"]
        trace_id: str = state["request_id"][-32:] if client is None else client[1]
        super().__init__(trace_id)
        self._tracing = tracing
        self._tracer = tracer
        self._scope: Any = scope
        self._client = client
        self._ids = trace_id, os.urandom(8).hex()
        self.traceparent = f"00-{'-'.join(self._ids)}-{'00' if client is None else client[3]}"
        self._started_at: float = state["started_at"]
        self._phases: list[tuple[str, float]] = [("catalog", self._started_at)]
        """Name of each phase and the time of time.perf_counter() at which it began. An empty name
        is a gap between two phases."""
        self._annotations: dict[str, Callable[[], Attributes]] = {}
        self._events: list[Event] = []
        self._epoch_ns = 0
        """Unix time in nanoseconds at which time.perf_counter() was 0. Set at the end."""
        self._error = ""
        self._failed_phase = ""
        self._make_detail: Callable[[], Detail] | None = None
        self._when_kept: Callable[[int, int], None] | None = None

    def enter(self, phase: str) -> None:
        self._phases.append((phase, time.perf_counter()))

    def annotate(self, attributes: Callable[[], Attributes]) -> None:
        self._annotations[self._phases[-1][0]] = attributes

    def leave(self) -> None:
        self.enter("")

    def drop_phases(self) -> None:
        self._phases = []

    def event(self, name: str) -> None:
        self._events.append(Event(name, time.perf_counter(), {}))

    def fail(self, code: str) -> None:
        if not self._error:
            self._error = code
            self._failed_phase = self._phases[-1][0] if self._phases else ""

    def detail(self, make: Callable[[], Detail]) -> None:
        self._make_detail = make

    def when_kept(self, tell: Callable[[int, int], None]) -> None:
        self._when_kept = tell

    def end(self, status: int | None) -> None:
        if self.tenant is None:
            return
        ended_at = time.perf_counter()
        self._epoch_ns = time.time_ns() - round(ended_at * 1e9)
        is_failed = bool(self._error) and (status is None or status < 400 or status >= 500)
        span = self._begin_span(status, self._why_kept(is_failed, ended_at))
        if not span.is_recording():
            return
        if self._when_kept is not None:
            ids = span.get_span_context()
            self._when_kept(ids.trace_id, ids.span_id)
        detail = NO_DETAIL if self._make_detail is None else self._make_detail()
        span.set_attributes(detail.attributes)
        span.set_attributes(self._latencies(detail.stages, ended_at))
        if self._error:
            span.set_attribute("error.type", self._error)
        if is_failed:
            span.set_status(StatusCode.ERROR)
        for event in [*self._events, *detail.events][:MAX_EVENTS]:
            span.add_event(event.name, event.attributes, self._nanoseconds(event.at))
        self._make_children(trace_api.set_span_in_context(span), detail.stages, ended_at)
        span.end(self._nanoseconds(ended_at))

    def _why_kept(self, is_failed: bool, ended_at: float) -> str | None:
        waited_s = (self.first_output_at or ended_at) - self._started_at
        why = "error" if is_failed else "slow" if waited_s >= self._tracing.slow_s else None
        return why if why and self._tracing.may_keep(ended_at) else None

    def _begin_span(self, status: int | None, kept: str | None) -> Span:
        method: str = self._scope["method"]
        path: str = self._scope["path"]
        route: str = self._scope.get("path_template") or path
        attributes: dict[str, Value] = {
            "http.request.method": method,
            "http.route": route,
            "url.path": path,
            "url.scheme": self._scope["scheme"],
        }
        if self.tenant is not None:
            attributes["loraplex.tenant.id"] = self.tenant.id
            attributes["loraplex.tenant.name"] = self.tenant.name
        if self.model:
            attributes["gen_ai.request.model"] = self.model
        if status is not None:
            attributes["http.response.status_code"] = status
        if kept is not None:
            attributes[KEPT] = kept
        ids = tuple(int(each, 16) for each in self._ids)
        token = context_api.attach(context_api.set_value(REQUEST_IDS, ids))
        try:
            return self._tracer.start_span(
                f"{method} {route}",
                self._parent(),
                SpanKind.SERVER,
                attributes,
                start_time=self._nanoseconds(self._started_at),
            )
        finally:
            context_api.detach(token)

    def _parent(self) -> Context:
        """Returns the context of the client's span, or an empty one."""
        if self._client is None:
            return Context()
        trace_id, span_id, flags = (int(each, 16) for each in self._client.groups())
        span = SpanContext(
            trace_id,
            span_id,
            is_remote=True,
            trace_flags=TraceFlags(flags),
            trace_state=read_trace_state(find_headers(self._scope, b"tracestate")),
        )
        return trace_api.set_span_in_context(NonRecordingSpan(span), Context())

    def _latencies(self, stages: list[Stage], ended_at: float) -> Attributes:
        """Returns latencies in seconds, with the attribute names of the GenAI conventions and, if
        `has_older_names` is set, with the names in vLLM's traces."""
        found: dict[str, Value] = {}
        is_older = self._tracing.has_older_names
        if self.first_output_at is not None:
            first_s = self.first_output_at - self._started_at
            found["gen_ai.response.time_to_first_chunk"] = first_s
            if is_older:
                found["gen_ai.latency.time_to_first_token"] = first_s
        if is_older:
            found["gen_ai.system"] = "loraplex"
            found["gen_ai.latency.e2e"] = ended_at - self._started_at
            for stage in stages:
                if (name := OLDER_LATENCIES.get(stage.name)) is not None:
                    found[name] = stage.ended_at - stage.begun_at
        return found

    def _make_children(self, within: Context, stages: list[Stage], ended_at: float) -> None:
        ends = [begun_at for _, begun_at in self._phases[1:]] + [ended_at]
        # If no worker ran the request, there are no phases, but `ends` still has the end of the
        # request. zip() then yields nothing.
        for (name, begun_at), end in zip(self._phases, ends, strict=False):
            if not name:
                continue
            annotate = self._annotations.get(name)
            attributes = None if annotate is None else annotate()
            span = self._start(name, within, begun_at, attributes)
            if name == self._failed_phase:
                span.set_status(StatusCode.ERROR)
            if name == "stream":
                below = trace_api.set_span_in_context(span)
                for stage in stages:
                    child = self._start(stage.name, below, stage.begun_at, stage.attributes)
                    child.end(self._nanoseconds(stage.ended_at))
            span.end(self._nanoseconds(end))

    def _start(
        self, name: str, within: Context, begun_at: float, attributes: Attributes | None
    ) -> Span:
        return self._tracer.start_span(
            name, within, attributes=attributes, start_time=self._nanoseconds(begun_at)
        )

    def _nanoseconds(self, at: float) -> int:
        """Returns nanoseconds since the Unix epoch for a time of time.perf_counter()."""
        return self._epoch_ns + round(at * 1e9)
