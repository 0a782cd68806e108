"""What is counted, sent to a real OTLP receiver; and which variables ask for it."""

from __future__ import annotations

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from prometheus_client import CollectorRegistry

from loraplex.errors import BadSettings
from loraplex.otlp import Signal, otlp_url, resource
from loraplex.otlp_metrics import MetricSender, check_metric_sending, send_interval_s
from telemetry.tallies import PAGE, Counter, Histogram, ReadCounter, exemplar
from tests.otlp_receiver import ReceivedMetric, otlp_receiver

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/"}
HOUR_S = 3600.0


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "otlp"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"},
        {**ENDPOINT, "OTEL_METRICS_EXPORTER": "none"},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_metrics_are_sent_only_where_asked_for(environ: dict[str, str]) -> None:
    assert otlp_url(environ, "metrics") is None
    check_metric_sending({**environ, "OTEL_METRIC_EXPORT_INTERVAL": "often"})


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        (ENDPOINT, "http://collector:4318/v1/metrics"),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, "http://localhost:4318/v1/metrics"),
        (
            {**ENDPOINT, "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "https://metrics/here"},
            "https://metrics/here",
        ),
    ],
)
def test_where_they_go(environ: dict[str, str], url: str) -> None:
    assert otlp_url(environ, "metrics") == url


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_METRICS_EXPORTER", "console"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "often"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "nan"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(BadSettings, match=name):
        check_metric_sending(ENDPOINT | {name: value})


@pytest.mark.parametrize("signal", ["traces", "metrics"])
def test_another_protocol_sends_nothing_and_stops_nothing(
    signal: Signal, caplog: pytest.LogCaptureFixture
) -> None:
    own = f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL"
    for name, value in (("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), (own, "http/json")):
        assert otlp_url(ENDPOINT | {name: value}, signal) is None
        assert f"{signal} are not exported: {name} is {value!r}" in caplog.text
    own_is_right = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", own: "http/protobuf"}
    assert otlp_url(ENDPOINT | own_is_right, signal) is not None


def test_the_interval_is_the_standards() -> None:
    assert send_interval_s({}) == 60
    assert send_interval_s({"OTEL_METRIC_EXPORT_INTERVAL": "250"}) == 0.25


def sent(temporality: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, ReceivedMetric]]:
    """What a process sends of a counter and a histogram after a minute, so to speak, and at its
    end."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", temporality)
    found: list[dict[str, ReceivedMetric]] = []
    with otlp_receiver() as receiver:
        exporter = OTLPMetricExporter(f"{receiver.url}/v1/metrics")
        counter = Counter("vllm:things", "Things.", ("kind",))
        histogram = Histogram("waited_seconds", "Waits.", (0.5, 1, 10), ("kind",))
        page = CollectorRegistry()
        for collector in (counter, histogram):
            PAGE.unregister(collector)
            page.register(collector)
        sender = MetricSender(exporter, HOUR_S, resource({}, "gateway", "1"), page)
        for turn in range(2):
            counter.add(2, "a")
            histogram.record(0.5, "a")
            histogram.record(3.0, "a", count=2)
            histogram.record(99.0, "a")
            histogram.exemplify(exemplar(7, 8, 3.0, 1e9 + turn), "a")
            if turn == 0:
                sender.send()
            else:
                sender.start()
                sender.end()
            metrics = receiver.metrics["loraplex-gateway"]
            found.append({name: metrics[name] for name in metrics if "gen_ai" not in name})
    return found


def test_a_histogram_arrives_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that was counted before the process ended."""
    first, last = sent("cumulative", monkeypatch)
    assert set(last) == {"vllm:things", "waited_seconds"}
    (point,) = last["vllm:things"].points
    assert (last["vllm:things"].kind, point.attributes, point.value) == ("sum", {"kind": "a"}, 4)
    waited = last["waited_seconds"]
    assert (waited.kind, waited.unit) == ("histogram", "s")
    (point,) = waited.points
    assert (point.attributes, point.bounds) == ({"kind": "a"}, [0.5, 1, 10])
    assert (point.counts, point.value) == ([2, 0, 4, 2], 2 * 105.5)
    assert point.exemplars == {f"{7:032x}": 3.0}
    assert [point.counts for point in first["waited_seconds"].points] == [[1, 0, 2, 1]]


def test_who_wants_differences_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for metrics in sent("delta", monkeypatch):
        (point,) = metrics["waited_seconds"].points
        assert (point.counts, point.value) == ([1, 0, 2, 1], 105.5)
        assert [point.value for point in metrics["vllm:things"].points] == [2]


def test_a_series_that_ended_and_began_again_counts_from_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of a tenant whose use was counted among others for a while. A counter that cannot
    be read for a while goes on."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    a, b = {"tenant": "a"}, {"tenant": "b"}
    turns: list[list[tuple[float, dict[str, str]]]] = []
    turns += [[(5, a), (1, b)], [(2, b)], [], [(7, a), (4, b)]]

    def read() -> list[tuple[float, dict[str, str]]]:
        if not (figures := turns.pop(0)):
            raise RuntimeError("dictionary changed size during iteration")
        return figures

    counter, page = ReadCounter("tenant_tokens", "Tokens.", read), CollectorRegistry()
    PAGE.unregister(counter)
    page.register(counter)
    found: list[dict[str, float]] = []
    with otlp_receiver() as receiver:
        exporter = OTLPMetricExporter(f"{receiver.url}/v1/metrics")
        sender = MetricSender(exporter, HOUR_S, resource({}, "gateway", "1"), page)
        for _ in range(4):
            receiver.metrics.clear()
            sender.send()
            metrics = receiver.metrics.get("loraplex-gateway", {})
            points = metrics["tenant_tokens"].points if "tenant_tokens" in metrics else []
            found.append({point.attributes["tenant"]: point.value for point in points})
    assert found == [{"a": 5, "b": 1}, {"b": 1}, {}, {"a": 7, "b": 2}]
