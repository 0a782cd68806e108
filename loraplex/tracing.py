"""Destination and sampling of traces, from OpenTelemetry's standard variables, and the
OpenTelemetry SDK that sends them.

https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from threading import Thread
from typing import NamedTuple

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from gateway.tracing import KEPT, REQUEST_IDS, Tracing
from loraplex.errors import BadSettings
from loraplex.otlp import SEND_TIMEOUT_S, choice, otlp_url, resource, without_secrets

SAMPLERS = ("always_on", "always_off", "traceidratio")
"""Supported samplers. Each is also supported with the prefix `parentbased_`."""


class TraceDestination(NamedTuple):
    """URL to which a gateway sends its traces, and the sampler that selects them."""

    url: str
    sampler: Sampler
    sampling: str
    """Name of the sampler as in the variables, and its ratio if it has one."""

    def __str__(self) -> str:
        return f"{without_secrets(self.url)} ({self.sampling})"


def trace_destination(environ: Mapping[str, str]) -> TraceDestination | None:
    """Returns the destination of traces. Returns None unless an endpoint is given or
    OTEL_TRACES_EXPORTER is `otlp`. Raises BadSettings for unsupported values."""
    if (url := otlp_url(environ, "traces")) is None:
        return None
    return TraceDestination(url, *_sampler(environ))


@asynccontextmanager
async def tracing_to(
    destination: TraceDestination | None, *, instance_id: str, slow_s: float
) -> AsyncGenerator[Tracing]:
    """Creates the tracing of one gateway. At the end of the block, sends the remaining spans.

    `slow_s` is the number of seconds to the first token above which a request's trace is always
    kept.
    """
    if destination is None:
        yield Tracing()
        return
    # Imported here because it loads an HTTP client, which a gateway without traces does not need.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider = TracerProvider(
        KeepingSampler(destination.sampler),
        resource(os.environ, "gateway", instance_id),
        shutdown_on_exit=False,
        id_generator=RequestIds(),
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(destination.url)))
    opted_in = os.environ.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").split(",")
    try:
        yield Tracing(
            provider.get_tracer("loraplex.gateway"),
            slow_s=slow_s,
            has_older_names="gen_ai_latest_experimental" not in map(str.strip, opted_in),
        )
    finally:
        # The shutdown runs in a thread that may be abandoned, because it may take longer than an
        # ending process may wait.
        sending = Thread(target=provider.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, SEND_TIMEOUT_S)


class KeepingSampler(Sampler):
    """Sampler that keeps the requests that the gateway marks, and asks another sampler about all
    other requests. All spans of a request follow the request's decision."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        parent = trace.get_current_span(parent_context).get_span_context()
        is_inside = parent.is_valid and not parent.is_remote
        if is_inside or (attributes is not None and KEPT in attributes):
            decision = Decision.RECORD_AND_SAMPLE
            return SamplingResult(decision, attributes, parent.trace_state)
        return self._sampler.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )

    def get_description(self) -> str:
        return f"KeepingSampler{{{self._sampler.get_description()}}}"


class RequestIds(RandomIdGenerator):
    """Generator of span ids, which gives a request's own span the ids of the request."""

    def generate_trace_id(self) -> int:
        given = context.get_value(REQUEST_IDS)
        return given[0] if isinstance(given, tuple) else super().generate_trace_id()

    def generate_span_id(self) -> int:
        given = context.get_value(REQUEST_IDS)
        return given[1] if isinstance(given, tuple) else super().generate_span_id()


def _sampler(environ: Mapping[str, str]) -> tuple[Sampler, str]:
    """Returns the sampler and its name."""
    allowed = " ".join([*SAMPLERS, *(f"parentbased_{name}" for name in SAMPLERS)])
    name = choice(environ, "OTEL_TRACES_SAMPLER", "parentbased_always_on", allowed)
    called = name
    match name.removeprefix("parentbased_"):
        case "always_on":
            sampler = ALWAYS_ON
        case "always_off":
            sampler = ALWAYS_OFF
        case _:
            ratio = _ratio(environ.get("OTEL_TRACES_SAMPLER_ARG") or "1")
            sampler, called = TraceIdRatioBased(ratio), f"{name} {ratio:g}"
    return (ParentBased(sampler) if name.startswith("parentbased_") else sampler), called


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise BadSettings(f"OTEL_TRACES_SAMPLER_ARG takes a number from 0 to 1, not {text!r}")
    return ratio
