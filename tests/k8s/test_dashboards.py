"""Every query of the dashboards and alert rules asks for what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import pytest
import yaml

from gateway.metering.usage_loader import Status
from tests.dashboards import JOBS, alerts, queries
from tests.metric_table import VLLM_DASHBOARD, Row, documented, samples_of
from tests.preloaded import ROOT
from workers.wire.protocol import ErrorCode, ServiceClass

RUNBOOK = "docs/operate/alerts.md"
TARGET = {"instance", "job"}
"""Labels that Prometheus adds."""
PROCESS = {
    name: {"process"}
    for name in (
        *("process_cpu_seconds_total", "process_resident_memory_bytes"),
        *("process_open_fds", "process_max_fds"),
    )
}
VALUES = {
    "state": {"ready", "silent", "draining", "lost", "absent"},
    "status": {each.value for each in Status},
    "class": {each.value for each in ServiceClass},
    "code": {each.value for each in ErrorCode},
    "kind": {"prompt", "cached", "completion", "retried", "resumed", "poisonous"},
    "tenant": {"other"},
}
"""What a query may name of a label; of all others it takes any."""
OF_VLLM = (
    *("vllm:e2e_request_latency_seconds", "vllm:prompt_tokens_total"),
    *("vllm:generation_tokens_total", "vllm:inter_token_latency_seconds"),
    *("vllm:time_per_output_token_seconds", "vllm:num_requests_running"),
    *("vllm:num_requests_waiting", "vllm:time_to_first_token_seconds"),
    *("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:request_prompt_tokens"),
    *("vllm:request_generation_tokens", "vllm:request_success_total"),
    *("vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds"),
    *("vllm:request_decode_time_seconds", "vllm:request_max_num_generation_tokens"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    *("vllm:num_preemptions_total", "vllm:iteration_tokens_total"),
    *("vllm:lora_requests_info", "vllm:cache_config_info"),
)
"""What vLLM's published dashboards and the endpoint pickers of Kubernetes read."""


def labels_by_sample() -> dict[str, set[str]]:
    """Of every name that a query may use."""
    found: dict[str, set[str]] = {"up": set(), **PROCESS}
    for row in documented().values():
        for name in samples_of(row):
            found[name] = set(row.labels) | ({"le"} if name.endswith("_bucket") else set())
    return found


KNOWN = labels_by_sample()


def children(expr: Any) -> list[Any]:
    match expr:
        case promql.AggregateExpr():
            return [expr.expr] + ([expr.param] if expr.param is not None else [])
        case promql.BinaryExpr():
            return [expr.lhs, expr.rhs]
        case promql.Call():
            return list(expr.args)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return [expr.expr]
        case promql.MatrixSelector():
            return [expr.vector_selector]
        case _:
            return []


def whole(expr: Any) -> Iterator[Any]:
    yield expr
    for child in children(expr):
        yield from whole(child)


@pytest.mark.parametrize(("where", "query", "legend"), list(queries()))
def test_a_query_asks_for_what_is_there(where: str, query: str, legend: str) -> None:
    tree = promql.parse(query.replace("$__rate_interval", "5m"))
    parts = list(whole(tree))
    selectors = [part for part in parts if isinstance(part, promql.VectorSelector)]
    assert selectors, where
    available = set(TARGET)
    for selector in selectors:
        assert selector.name in KNOWN, f"{where}: there is no metric {selector.name}"
        own = KNOWN[selector.name] | TARGET
        available |= own
        jobs = [m.value for m in selector.matchers.matchers if m.name == "job"]
        assert jobs == [JOBS], f"{where}: {selector.name} is of any job"
        for matcher in selector.matchers.matchers:
            assert matcher.name in own, f"{where}: {selector.name} has no {matcher.name}"
            if matcher.name in VALUES and not matcher.value.startswith("$"):
                assert set(matcher.value.split("|")) <= VALUES[matcher.name], where
    for part in parts:
        if isinstance(part, promql.AggregateExpr) and part.modifier is not None:
            below = [s for s in whole(part) if isinstance(s, promql.VectorSelector)]
            for selector in below:
                lacking = set(part.modifier.labels) - KNOWN[str(selector.name)] - TARGET
                assert not lacking, f"{where}: {selector.name} has no {lacking}"
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= available, where


def test_a_query_for_what_is_not_there_is_found() -> None:
    for query in (
        'sum(rate(loraplex_request_total{job=~"loraplex.*"}[5m]))',
        'sum(rate(loraplex_requests_total{job=~"loraplex.*", model="x"}[5m]))',
        'sum by (status) (rate(loraplex_tokens_total{job=~"loraplex.*"}[5m]))',
        'max(loraplex_workers{job=~"loraplex.*", state="gone"})',
        "sum(rate(loraplex_requests_total[5m]))",
    ):
        with pytest.raises(AssertionError):
            test_a_query_asks_for_what_is_there("here", query, "")


def test_each_alert_has_its_runbook() -> None:
    text = (ROOT / RUNBOOK).read_text()
    sections = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    assert sections == [rule["alert"] for rule in alerts()]
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"{RUNBOOK}#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_what_others_read_by_vllms_names_is_there() -> None:
    table: dict[str, Row] = documented()
    assert [name for name in OF_VLLM if name not in table] == []
    assert all("model_name" in table[n].labels for n in OF_VLLM if n != "vllm:lora_requests_info")


def test_vllms_own_dashboard_finds_what_it_asks_for() -> None:
    for name, labels in VLLM_DASHBOARD.items():
        assert labels <= KNOWN[name], name


def test_the_local_stack_names_exact_versions_and_files_that_are_there() -> None:
    folder = ROOT / "examples" / "observability"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (folder / source).exists(), volume
    prometheus = yaml.safe_load((folder / "prometheus.yaml").read_text())
    mounted = " ".join(services["prometheus"]["volumes"])
    assert all(f":{path}:" in mounted for path in prometheus["rule_files"])
