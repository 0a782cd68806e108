"""The table of metrics that is kept in the documentation, and what a real page has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.preloaded import ROOT

DOCUMENT = ROOT / "docs" / "operate" / "metrics.md"
OTHERS = ("process_", "python_")
"""Of the Prometheus client itself."""
VLLM_DASHBOARD = {
    **{
        f"vllm:{name}_bucket": {"model_name", "le"}
        for name in (
            *("e2e_request_latency_seconds", "time_to_first_token_seconds"),
            *("time_per_output_token_seconds", "request_prompt_tokens"),
            "request_generation_tokens",
        )
    },
    **{
        f"vllm:{name}": {"model_name"}
        for name in (
            *("e2e_request_latency_seconds_sum", "e2e_request_latency_seconds_count"),
            *("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count"),
            *("time_per_output_token_seconds_sum", "time_per_output_token_seconds_count"),
            *("prompt_tokens_total", "generation_tokens_total"),
            *("num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc"),
            *("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
            *("request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum"),
        )
    },
    "vllm:request_success_total": {"model_name", "finished_reason"},
}
"""Samples that the dashboard published by vLLM asks for, and the labels it matches or sums by.

https://github.com/vllm-project/vllm, examples/online_serving/prometheus_grafana/grafana.json
"""
ROW = re.compile(r"\| `([\w:.]+)` \| (\w+) \| (.*?) \| (.*) \|")
BUCKETS = re.compile(r"\| (`[\w:., `]+`) \| ([\d., e+]+) \|")


class Row(NamedTuple):
    """One metric. name: as queries have it, but for the suffixes of a histogram."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def documented() -> dict[str, Row]:
    """By name: those of a page."""
    return {name: row for name, row in _rows().items() if "." not in name}


def of_otlp() -> dict[str, Row]:
    """By the name that is sent: those of a page, and some more."""
    return {
        name.removesuffix("_total") if row.kind == "counter" else name: row
        for name, row in _rows().items()
    }


def unit_of(name: str) -> str:
    if re.search(r"_seconds(_total)?$", name) or "." in name:
        return "s"
    return "By" if re.search(r"_bytes(_total)?$", name) else ""


def buckets() -> dict[str, list[float]]:
    """Upper bounds by the histogram's name, as the document has them."""
    return {
        name: [float(bound) for bound in bounds.split(", ")]
        for names, bounds in BUCKETS.findall(DOCUMENT.read_text())
        for name in re.findall(r"`([^`]+)`", names)
    }


def _rows() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for name, kind, labels, meaning in ROW.findall(DOCUMENT.read_text()):
        names = tuple(sorted(re.findall(r"`([\w.]+)`", labels)))
        assert name not in rows, f"{name} is there twice"
        rows[name] = Row(name, kind, names, meaning)
    return rows


def parse(page: str) -> dict[str, Metric]:
    """The families of a page by the names that the table has."""
    return {_name(family): family for family in text_string_to_metric_families(page)}


def shown(page: str) -> dict[str, Row]:
    """Our rows of a page, by name. Raises AssertionError where the samples of a family have
    different labels."""
    rows: dict[str, Row] = {}
    for name, family in parse(page).items():
        if not name.startswith(OTHERS):
            found = {tuple(sorted(set(s.labels) - {"le"})) for s in family.samples}
            assert len(found) == 1, (name, found)
            rows[name] = Row(name, family.type, found.pop(), family.documentation)
    return rows


def samples_of(row: Row) -> Iterable[str]:
    """Names that a query may use."""
    if row.kind == "histogram":
        return [row.name + suffix for suffix in ("_bucket", "_sum", "_count")]
    return [row.name]


def _name(family: Metric) -> str:
    return family.name + "_total" if family.type == "counter" else family.name
