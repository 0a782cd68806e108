"""/metrics of a box and of its worker after a short load, and the log line of each request."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from openai import NotFoundError

from tests.doubles import write_adapter
from tests.e2e.tiny import NAME, Tiny
from tests.metric_table import documented, parse, shown
from tests.stack import Stack, running
from tests.worker_state import worker_page

PROMPT = [1, 2, 3] * 20
NUM_TOKENS = 20
NUM_PLAIN = 3
DEADLINE_S = 20.0
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
RARE = {
    "loraplex_connections_refused_total": "no bound of the server was met",
    "loraplex_sequence_failures_total": "no sequence failed",
    "loraplex_certificate_expiry_timestamp_seconds": "no TLS: tests/loraplex/test_certificates.py",
}
"""Metrics that this load does not bring forth."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """After three answers of the base model, one of an adapter and a refusal."""
    tiny = Tiny(tmp_path_factory.mktemp("metrics"))
    adapter = write_adapter(tiny.shape, tiny.folder / "adapter", rank=4, seed=1, b_std=0.5)
    with running(tiny.stack(memory=64 << 20, log_format="json")) as stack:
        key = stack.create_tenant("acme")
        stack.push(adapter, "bot", "acme")
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
        yield stack


def page_of(stack: Stack) -> str:
    where = json.loads((stack.data_dir / "serve.json").read_text())
    answer = httpx.get(f"{where['management_url']}/metrics")
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
        """The worker's status is of after the load."""
        found = values_of(page, "vllm:prefix_cache_hits_total").get(("0", NAME))
        running = values_of(page, "vllm:num_requests_running").get(("0", NAME))
        return bool(found) and running == 0

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
    assert values_of(page, "vllm:request_success_total") == {("0", "length", NAME): num_requests}
    decoded = values_of(page, "vllm:request_decode_time_seconds_sum")[labels]
    between = values_of(page, "vllm:inter_token_latency_seconds_sum")[labels]
    assert 0 < between == pytest.approx(decoded)
    buckets = values_of(page, "vllm:inter_token_latency_seconds_bucket")
    assert buckets["0", "+Inf", NAME] == num_generated - num_requests
    assert values_of(page, "loraplex_requests_total") == {
        ("standard", NAME, "completed"): num_requests
    }
    tokens = values_of(page, "loraplex_tokens_total")
    assert tokens["standard", "completion", NAME] == num_generated
    assert values_of(page, "loraplex_adapter_requests_total")["bot", tenant_of(page), "1"] == 1
    assert values_of(page, "loraplex_refusals_total")["model_not_found",] == 1
    assert values_of(page, "loraplex_adapter_loads_total")["0", NAME, "device"] >= 1
    assert values_of(page, "loraplex_workers")["ready",] == 1


def tenant_of(page: str) -> str:
    """Id of the only tenant that has used anything."""
    (tenant,) = {key[0] for key in values_of(page, "loraplex_tenant_requests_total")} - {"other"}
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


def test_each_request_leaves_one_line_with_its_trace(stack: Stack) -> None:
    lines = [json.loads(line) for line in stack.log.splitlines() if line.startswith("{")]
    answered = [line for line in lines if line["message"] == "answered"]
    assert len(answered) == NUM_PLAIN + 1
    assert len({line["request_id"] for line in answered}) == NUM_PLAIN + 1
    (traced,) = [line for line in answered if line["model"] == "bot"]
    assert traced["trace_id"] == TRACE
    assert (traced["in_tok"], traced["out_tok"]) == (len(PROMPT), NUM_TOKENS)
    assert "prompt" not in traced
