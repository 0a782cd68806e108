"""Tracing as the gateway role sets it up, towards a receiver of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

import pytest

from gateway.tracing import Tracing
from loraplex.tracing import trace_destination, tracing_to
from tests.otlp_receiver import OtlpReceiver, otlp_receiver

SLOW_S = 0.5
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"


@contextmanager
def traced(**variables: str) -> Iterator[tuple[Tracing, OtlpReceiver]]:
    """variables: OTEL_* of the process, beside the endpoint."""
    with otlp_receiver() as receiver, pytest.MonkeyPatch.context() as patch:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, **variables}
        for name, value in {"OTEL_BSP_SCHEDULE_DELAY": "20", **environ}.items():
            patch.setenv(name, value)
        with asyncio.Runner() as runner:
            stack = AsyncExitStack()
            opened = tracing_to(trace_destination(environ), instance_id="gateway-1", slow_s=SLOW_S)
            yield runner.run(stack.enter_async_context(opened)), receiver
            runner.run(stack.aclose())
