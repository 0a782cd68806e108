"""/metrics of a box and of its worker after a short load, the same over OTLP, and the log line of
each request."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import pytest
from openai import NotFoundError, RateLimitError
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families

from tests.dashboards import alerts, queries
from tests.doubles import write_adapter
from tests.e2e.tiny import NAME, Tiny
from tests.metric_table import (
    VLLM_DASHBOARD,
    buckets,
    documented,
    of_otlp,
    parse,
    samples_of,
    shown,
    unit_of,
)
from tests.otlp_receiver import (
    SERVER,
    OtlpReceiver,
    ReceivedMetric,
    ReceivedPoint,
    otlp_receiver,
)
from tests.prometheus import PROGRAM, prometheus
from tests.stack import PLAIN, Stack, running
from tests.worker_state import worker_page

pytestmark = pytest.mark.full

PROMPT = [1, 2, 3] * 20
NUM_TOKENS = 20
NUM_PLAIN = 3
OTHER = "other-bot"
"""An adapter that comes when all else is there."""
DEADLINE_S = 60.0
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
STILL = {
    "loraplex_catalog_age_seconds": "the database answers",
    "loraplex_usage_log_bytes": "it is loaded at once",
    "loraplex_usage_log_max_bytes": "a setting",
    "loraplex_database_clock_difference_seconds": "the database is on this machine",
    "loraplex_workers": "one worker, which stays",
    "loraplex_waiting_tokens": "prompts wait for milliseconds",
    "loraplex_adapter_leases": "read once a second, held for milliseconds",
    "loraplex_adapter_evictions_total": "there is room for all",
    "loraplex_adapter_load_failures_total": "no load fails",
    "loraplex_model_load_seconds": "loaded once",
    "loraplex_model_on_device": "one model",
    "loraplex_model_swaps_total": "one model",
    "loraplex_moves_total": "one worker",
    "loraplex_sequence_failures_total": "no sequence fails",
    "loraplex_limit_waits_total": "no tenant is near a limit that others use",
    "loraplex_lease_renewal_failures_total": "the database answers",
    "loraplex_integrity_failures_total": "nothing contradicts itself",
    "vllm:num_preemptions_total": "there is room for all",
    "vllm:num_requests_waiting": "requests wait for milliseconds",
    "vllm:num_requests_running": "read once a second",
    "vllm:kv_cache_usage_perc": "read once a second",
    "vllm:gpu_cache_usage_perc": "read once a second",
    'status="failed"': "no request fails",
    "up{": "the page is there",
}
"""What a query may ask for and stay as it is under a short load, and why."""
RARE = {
    "loraplex_connections_refused_total": "no bound of the server was met",
    "loraplex_certificate_expiry_timestamp_seconds": "no TLS: tests/loraplex/test_certificates.py",
}
"""Metrics that this load does not bring forth."""


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver) -> Iterator[Stack]:
    """After three answers of the base model, one of an adapter and a refusal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        patch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "250")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        yield from serving(tmp_path_factory)


def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    tiny = Tiny(tmp_path_factory.mktemp("metrics"))
    adapter, _ = (
        write_adapter(tiny.shape, tiny.folder / name, rank=4, seed=seed, b_std=0.5)
        for seed, name in enumerate(("adapter", OTHER))
    )
    # A process has the metrics of the modules that it has imported.
    box = tiny.stack(command=PLAIN, memory=64 << 20, log_format="json")
    with running(box) as stack:
        key = stack.create_tenant("acme")
        stack.push(adapter, "bot", "acme")
        stack.cli("price", "set", NAME, "--input", "1", "--output", "2")
        limited = stack.create_tenant("initech")
        stack.cli("quota", "set", "--tenant", "initech", "--requests-per-minute", "0")
        traced = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        with stack.openai(key) as client:
            for model in [NAME] * NUM_PLAIN + ["bot"]:
                client.completions.create(
                    model=model,
                    prompt=PROMPT,
                    max_tokens=NUM_TOKENS,
                    extra_body={"ignore_eos": True},
                    extra_headers=traced if model == "bot" else {},
                )
            with pytest.raises(NotFoundError):
                client.completions.create(model="nope", prompt=PROMPT)
        with stack.openai(limited) as client, pytest.raises(RateLimitError):
            client.completions.create(model=NAME, prompt=PROMPT)
        yield stack


def fetch(stack: Stack, accept: str) -> httpx.Response:
    where = json.loads((stack.data_dir / "serve.json").read_text())
    return httpx.get(f"{where['management_url']}/metrics", headers={"accept": accept})


def page_of(stack: Stack) -> str:
    answer = fetch(stack, "*/*")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return answer.text


def values_of(page: str, name: str) -> dict[tuple[str, ...], float]:
    """Samples of this name by the values of their labels, in the order of the labels' names."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in parse(page).values()
        for sample in family.samples
        if sample.name == name
    }


def counted(page: str, name: str) -> dict[tuple[str, ...], float]:
    """Those above 0: known labels have a series before anything is counted."""
    return {labels: value for labels, value in values_of(page, name).items() if value}


def until(stack: Stack, is_there: Callable[[str], bool]) -> str:
    """The first page of which that holds: what a worker says of itself is up to a second old."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_there(page := page_of(stack)):
        assert time.monotonic() < deadline, page
        time.sleep(0.1)
    return page


@pytest.fixture(scope="module")
def page(stack: Stack) -> str:
    def is_there(page: str) -> bool:
        """The worker's status is of after the load, and the gateway has counted all answers."""
        ended = values_of(page, "vllm:e2e_request_latency_seconds_count").get(("0", NAME))
        running = values_of(page, "vllm:num_requests_running").get(("0", NAME))
        counted = sum(values_of(page, "loraplex_requests_total").values())
        return ended == counted == NUM_PLAIN + 1 and running == 0

    return until(stack, is_there)


def test_the_page_is_what_the_table_says(page: str) -> None:
    found, table = shown(page), documented()
    assert set(found) | set(RARE) == set(table)
    assert not set(found) & set(RARE)
    for name, row in found.items():
        assert row == table[name]


def test_a_workers_own_page_is_part_of_the_box(stack: Stack, page: str) -> None:
    own = shown(worker_page(stack))
    assert all(shown(page)[name] == row for name, row in own.items())
    assert "vllm:num_requests_waiting" in own and "loraplex_requests_total" not in own
    assert {key[-1] for key in values_of(page, "process_resident_memory_bytes")} == {
        "gateway",
        "worker",
    }


def test_values_are_those_of_the_load(page: str) -> None:
    num_requests = NUM_PLAIN + 1
    num_generated = num_requests * NUM_TOKENS
    labels = ("0", NAME)
    expected = {
        "vllm:generation_tokens_total": num_generated,
        "vllm:prompt_tokens_total": num_requests * len(PROMPT),
        "vllm:time_to_first_token_seconds_count": num_requests,
        "vllm:inter_token_latency_seconds_count": num_generated - num_requests,
        "vllm:e2e_request_latency_seconds_count": num_requests,
        "vllm:request_queue_time_seconds_count": num_requests,
        "vllm:request_prompt_tokens_sum": num_requests * len(PROMPT),
        "vllm:request_generation_tokens_sum": num_generated,
        "vllm:num_requests_running": 0,
    }
    for name, value in expected.items():
        assert values_of(page, name) == {labels: value}, name
    assert counted(page, "vllm:request_success_total") == {("0", "length", NAME): num_requests}
    decoded = values_of(page, "vllm:request_decode_time_seconds_sum")[labels]
    between = values_of(page, "vllm:inter_token_latency_seconds_sum")[labels]
    assert 0 < between == pytest.approx(decoded)
    buckets = values_of(page, "vllm:inter_token_latency_seconds_bucket")
    assert buckets["0", "+Inf", NAME] == num_generated - num_requests
    assert counted(page, "loraplex_requests_total") == {
        ("standard", NAME, "completed"): num_requests
    }
    tokens = values_of(page, "loraplex_tokens_total")
    assert tokens["standard", "completion", NAME] == num_generated
    assert values_of(page, "loraplex_adapter_requests_total")["bot", tenant_of(page), "1"] == 1
    assert counted(page, "loraplex_refusals_total") == {
        ("model_not_found",): 1,
        ("rate_limit_exceeded",): 1,
    }
    assert counted(page, "loraplex_limit_refusals_total") == {("requests_per_minute",): 1}
    refused = values_of(page, "loraplex_tenant_refusals_total")
    assert sorted(refused.values()) == [0, 1, 1] and refused["other",] == 0
    cost = values_of(page, "loraplex_tenant_cost_total")[tenant_of(page),]
    assert cost == pytest.approx((num_requests * len(PROMPT) + 2 * num_generated) / 1e6)
    assert values_of(page, "loraplex_queue_time_seconds_count") == {
        ("standard", "0", NAME): num_requests
    }
    assert values_of(page, "loraplex_adapters")["disk",] == 1
    assert values_of(page, "loraplex_adapter_loads_total")["0", NAME, "device"] >= 1
    assert values_of(page, "loraplex_workers")["ready",] == 1


def test_an_endpoint_picker_finds_its_signals(page: str) -> None:
    """As the Gateway API Inference Extension and llm-d read a page: single values, and the newest
    series of adapters, whose names are split at commas and compared with a request's model."""
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert values_of(page, f"vllm:{name}") == {("0", NAME): 0}
    (cache,) = parse(page)["vllm:cache_config_info"].samples
    assert int(cache.labels["block_size"]) > 0 and int(cache.labels["num_gpu_blocks"]) > 0
    adapters = max(parse(page)["vllm:lora_requests_info"].samples, key=lambda s: s.value).labels
    assert adapters["running_lora_adapters"].split(",") == ["bot"]
    assert adapters["waiting_lora_adapters"] == "" and int(adapters["max_lora"]) > 1


def test_what_vllms_dashboard_reads_moves(page: str) -> None:
    """All but what is 0 where nothing runs."""
    at_rest = {"running", "waiting", "perc"}
    for name in VLLM_DASHBOARD:
        is_at_rest = name.rpartition("_")[2] in at_rest
        assert is_at_rest == (sum(values_of(page, name).values()) == 0), name


def test_the_same_goes_over_otlp(page: str, receiver: OtlpReceiver) -> None:
    """From gateway and worker, each with its own."""
    counted = "vllm:e2e_request_latency_seconds"

    def is_there(sent: dict[str, dict[str, ReceivedMetric]]) -> bool:
        """All that the load has counted was sent."""
        workers = sent.get("loraplex-worker", {}).get(counted)
        gateways = sent.get("loraplex-gateway", {}).get("loraplex_requests")
        return bool(
            workers
            and gateways
            and sum(workers.points[0].counts) == sum(p.value for p in gateways.points) == 4
        )

    by_service = receiver.wait_for_metrics(is_there)
    assert set(by_service) == {"loraplex-gateway", "loraplex-worker"}
    assert counted not in by_service["loraplex-gateway"]
    sent = by_service["loraplex-gateway"] | by_service["loraplex-worker"]
    rows = {name: row for name, row in of_otlp().items() if row.name not in RARE}
    assert set(rows) == set(sent)
    bounds = {name: metric.points[0].bounds for name, metric in sent.items()}
    assert {name: found for name, found in bounds.items() if found} == buckets()
    kinds = {"counter": "sum", "gauge": "gauge", "histogram": "histogram"}
    for name, row in rows.items():
        metric = sent[name]
        assert (metric.kind, metric.unit) == (kinds[row.kind], unit_of(row.name)), name
        labels = set(row.labels) - {"error.type"}
        assert {tuple(sorted(p.attributes)) for p in metric.points} == {tuple(sorted(labels))}, name
    for name in (counted, "vllm:time_to_first_token_seconds", "loraplex_request_duration_seconds"):
        (point,) = sent[name].points
        assert values_of(page, f"{name}_sum") == {labels_of(point): point.value}
        bounds = [*(f"{bound:g}" for bound in point.bounds), "+Inf"]
        cumulative = dict(zip(bounds, accumulate(point.counts), strict=True))
        assert {
            dict(sample.labels)["le"]: sample.value
            for sample in parse(page)[name].samples
            if sample.name.endswith("_bucket")
        } == cumulative
    (generated,) = sent["vllm:generation_tokens"].points
    assert generated.value == (NUM_PLAIN + 1) * NUM_TOKENS


def labels_of(point: ReceivedPoint) -> tuple[str, ...]:
    return tuple(value for _, value in sorted(point.attributes.items()))


def test_latencies_have_traces_where_the_client_takes_them(
    stack: Stack, page: str, receiver: OtlpReceiver
) -> None:
    """In OpenMetrics and over OTLP; each is a trace that was sent."""
    answer = fetch(stack, "application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in parse_open(answer.text)}
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        samples = families[f"loraplex_{name}_seconds"].samples
        exemplars = {s.exemplar.labels["trace_id"]: s for s in samples if s.exemplar}
        assert exemplars, name
        for trace_id, sample in exemplars.items():
            bound = float(sample.labels["le"])
            assert 0 < sample.exemplar.value <= bound
            (request,) = [span for span in receiver.trace(trace_id) if span.kind == SERVER]
            assert request.span_id == sample.exemplar.labels["span_id"]
            assert request.attributes["loraplex.outcome"] == "completed"
        (sent,) = receiver.metrics["loraplex-gateway"][f"loraplex_{name}_seconds"].points
        assert sent.exemplars == {
            trace_id: pytest.approx(sample.exemplar.value) for trace_id, sample in exemplars.items()
        }
    assert set(families) == {family.name for family in text_string_to_metric_families(page)}
    names = {sample.name for family in families.values() for sample in family.samples}
    assert names >= {name for row in documented().values() for name in samples_of(row)} - set(RARE)
    assert "# {" not in page


def tenant_of(page: str) -> str:
    """Id of the only tenant that has used anything."""
    found = values_of(page, "loraplex_tenant_requests_total")
    (tenant,) = {key[0] for key, number in found.items() if number}
    return tenant


def test_the_doctor_finds_nothing_wrong_with_a_box_that_runs(stack: Stack) -> None:
    """Its exit code is 0, or `cli` raises."""
    findings = json.loads(stack.cli("doctor", "--json"))
    assert not [each for each in findings if each["state"] == "failed"]
    text = "\n".join(f"{each['check']}: {each['found']}" for each in findings)
    for pattern in (
        r"database: PostgreSQL \d+",
        r"database: the database's clock differs by 0\.\d s",
        rf"ports: {stack.url.removeprefix('http://')} is served",
        rf"server: {stack.url} is ready",
        r"server: worker \S+ is ready",
    ):
        assert re.search(pattern, text), (pattern, text)


@pytest.mark.usefixtures("page")
def test_each_request_leaves_one_line_with_its_trace(stack: Stack) -> None:
    lines = [json.loads(line) for line in stack.log.splitlines() if line.startswith("{")]
    answered = [line for line in lines if line["message"] == "answered"]
    assert len(answered) == NUM_PLAIN + 1
    assert len({line["request_id"] for line in answered}) == NUM_PLAIN + 1
    (traced,) = [line for line in answered if line["model"] == "bot"]
    assert traced["trace_id"] == TRACE
    assert (traced["in_tok"], traced["out_tok"]) == (len(PROMPT), NUM_TOKENS)
    assert "prompt" not in traced


def test_the_status_of_a_box_has_what_it_served(stack: Stack) -> None:
    """After the other tests, which know how many requests there were."""
    key = stack.create_tenant("globex")
    with stack.openai(key) as client:
        client.completions.create(model=NAME, prompt=PROMPT, max_tokens=NUM_TOKENS)

    deadline = time.monotonic() + DEADLINE_S
    while True:
        found = json.loads(stack.cli("status", "--json"))
        (model,), (worker,) = found["models"], found["workers"]
        if model["ttft"] and model["itl"]:
            break
        assert time.monotonic() < deadline, found
    assert 0 < model["itl"]["p50"] <= model["itl"]["p99"] < 60
    assert model["completion_tokens_per_s"] > 0 and worker["memory"]["kv"] > 0
    assert worker["adapters"]["device"]["number"] == 1
    assert f"loraplex on {stack.url}" in stack.cli("status")


def asked() -> Iterator[tuple[str, str]]:
    """Where a query stands, and the query: of our dashboards, of both sides of what an alert
    compares, and of the samples that vLLM's dashboard reads, as it asks for them."""
    for query in queries():
        expression = query.expression.replace("$__rate_interval", "5s").replace("$model", ".*")
        tree: Any = promql.parse(expression)
        is_alert = isinstance(tree, promql.BinaryExpr) and str(tree.op) in ("==", ">", "<")
        sides = (tree.lhs.prettify(), tree.rhs.prettify()) if is_alert else (expression,)
        yield from ((query.where, side) for side in sides if re.search(r"[a-z]", side))
    for name, labels in VLLM_DASHBOARD.items():
        by = f" by ({', '.join(sorted(labels - {'model_name'}))})" if len(labels) > 1 else ""
        is_gauge = not name.endswith(("_bucket", "_sum", "_count", "_total"))
        series = f'{name}{{model_name="{NAME}"}}'
        rate = series if is_gauge else f"sum{by} (rate({series}[5s]))"
        is_bucket = name.endswith("_bucket")
        yield f"vLLM: {name}", f"histogram_quantile(0.99, {rate})" if is_bucket else rate


@pytest.mark.skipif(PROGRAM is None, reason="needs prometheus, as of Debian's package of the name")
def test_every_query_moves_in_a_real_prometheus(stack: Stack, tmp_path: Path) -> None:
    """Our dashboards and alert rules, and what vLLM's dashboard reads, or it is listed why not."""
    where = json.loads((stack.data_dir / "serve.json").read_text())
    with prometheus(where["management_url"].removeprefix("http://"), tmp_path) as server:
        server.wait_for("vllm:generation_tokens_total")
        begun = time.time()
        keep_busy(stack)
        time.sleep(1.5)
        ended = time.time()
        empty: list[tuple[str, str]] = []
        still: list[tuple[str, str]] = []
        for where, query in asked():
            if any(name in query for name in RARE):
                continue
            series = server.values(query, begun, ended)
            if not series:
                empty.append((where, query))
            elif not any(len(values) > 1 for values in series):
                still.append((where, query))
        assert not empty
        assert not [each for each in still if not any(name in each[1] for name in STILL)]
        (group,) = server.get("rules")["groups"]
        assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
        assert len(group["rules"]) == len(alerts())


def keep_busy(stack: Stack) -> None:
    """For some seconds: answers, refusals, and one adapter more."""
    key = stack.create_tenant("hooli")
    limited = stack.create_tenant("umbrella")
    stack.cli("quota", "set", "--tenant", "umbrella", "--requests-per-minute", "0")
    stack.cli("quota", "set", "--tenant", "hooli", "--class", "interactive")
    stack.push(stack.data_dir.parent / OTHER, OTHER, "hooli")
    until_s = time.monotonic() + 3.0
    with stack.openai(key) as client, stack.openai(limited) as refused:
        for model in cycle([NAME, OTHER]):
            client.completions.create(
                model=model, prompt=PROMPT, n=4, max_tokens=100, extra_body={"ignore_eos": True}
            )
            with pytest.raises(RateLimitError):
                refused.completions.create(model=NAME, prompt=PROMPT)
            if time.monotonic() > until_s:
                return
