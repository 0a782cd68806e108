from __future__ import annotations

import pytest

from loraplex.errors import BadSettings
from loraplex.tracing import trace_destination

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:secret@collector:4318/"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_SERVICE_NAME": "other"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_traces_are_off_unless_asked_for(environ: dict[str, str]) -> None:
    assert trace_destination(environ) is None


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        (ENDPOINT, "http://user:secret@collector:4318/v1/traces"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "http://localhost:4318/v1/traces"),
        (
            {**ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://traces/here"},
            "https://traces/here",
        ),
    ],
)
def test_where_they_go(environ: dict[str, str], url: str) -> None:
    destination = trace_destination(environ)
    assert destination is not None and destination.url == url
    assert "secret" not in str(destination)


def test_the_sampler_is_said() -> None:
    sampler = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"}
    expected = "http://collector:4318/v1/traces (traceidratio 0.1)"
    assert str(trace_destination(ENDPOINT | sampler)) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ("OTEL_TRACES_SAMPLER_ARG", "2"),
        ("OTEL_TRACES_SAMPLER_ARG", "often"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: str) -> None:
    sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}
    with pytest.raises(BadSettings, match=name):
        trace_destination(ENDPOINT | sampler | {name: value})
