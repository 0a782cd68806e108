"""A served gateway against its own OpenAPI document, and hostile text wherever it takes text,
schemas and grammars among it.

`LORAPLEX_TEST_SCALE=full` sends 20,000 requests of each kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi import checks

from tests.admin.dump import dump
from tests.gateway.live import Live
from tests.hostile import texts
from tests.hostile_grammars import expressions, larks, schemas
from tests.scale import scaled

load_all_checks()
pytestmark = pytest.mark.soak

CASES = scaled(200, 20_000)
OPTIONS: dict[str, Any] = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
}
EXCLUDED = [
    # Rules between fields, the model's context and vocabulary, and chat templates are told in
    # words only: what fits the schema may be refused with 400 or 404.
    checks.positive_data_acceptance,
]
REPORTED = (
    *(
        "key_uses",
        "gateways",
        "gateway_load",
        "usage",
        "usage_hourly",
        "usage_totals",
        "version_outcomes",
    ),
    *(
        "quota_holders",
        "quota_leases",
        "adapter_faults",
        "version_proving",
        "version_proofs",
        "usage_kept",
    ),
    *("adapter_proofs", "catalog_generation", "catalog_changes", "workers"),
)
"""What gateways write while they serve."""
FIELDS = ("model", "prompt", "messages", "user", "cache_salt", "stop", "tokens", "stream")


@pytest.mark.full
async def test_every_answer_is_as_documented(live: Live) -> None:
    await live.make_ready("a")
    async with live.worker, live.gateway() as plane:
        await asyncio.to_thread(_compare, str(plane.client.base_url), live.key)


def _compare(url: str, key: str) -> None:
    document = requests.get(f"{url}/schema", timeout=20).json()
    OpenAPIV31SpecValidator(document).validate()
    assert not [path for path in document["paths"] if "admin" in path or "organization" in path]
    schema = schemathesis.openapi.from_dict(document)
    headers = {"authorization": f"Bearer {key}"}
    operations = [
        schema[path][method] for path, methods in document["paths"].items() for method in methods
    ]
    models = st.sampled_from(["tiny", "bot", "bot@1", "bot@prod"])
    with requests.Session() as session:
        for operation in operations:
            cases = st.one_of(
                operation.as_strategy(GenerationMode.POSITIVE).map(lambda case: (case, True)),
                operation.as_strategy(GenerationMode.NEGATIVE).map(lambda case: (case, False)),
            )

            @settings(max_examples=CASES // len(operations), **OPTIONS)
            @given(cases, st.none() | models)
            def check(case_and_kind: tuple[Any, bool], model: str | None) -> None:
                case, is_positive = case_and_kind
                # What is wrong of a wrong request may be its model.
                if is_positive and model is not None and _names_model(case):
                    case.body["model"] = model
                answer = case.call(base_url=url, session=session, headers=headers, timeout=60)
                case.validate_response(answer, headers=headers, excluded_checks=EXCLUDED)

            check()


def _names_model(case: Any) -> bool:
    return isinstance(case.body, dict) and "model" in case.body


@st.composite
def hostile_requests(draw: st.DrawFn) -> tuple[str, str, dict[str, Any]]:
    """Method, URL and arguments."""
    headers = {
        name: draw(texts).encode("utf-8", "replace").strip()
        for name in ("authorization", "x-api-key", "traceparent", "x-forwarded-for")
        if draw(st.integers(0, 3)) == 0
    }
    path = draw(
        st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
        | texts.map(lambda text: "/v1/models/" + quote(text.encode("utf-8", "replace"), safe=""))
    )
    body: dict[str, Any] = {"model": draw(texts), "prompt": draw(texts)}
    body |= draw(st.dictionaries(st.sampled_from(FIELDS), texts, max_size=3))
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": draw(texts), "name": draw(texts)}]
    method = "GET" if path.startswith("/v1/models") else "POST"
    content = json.dumps(body) if draw(st.booleans()) else draw(texts)
    arguments = {"headers": headers, "content": content.encode("utf-8", "replace")}
    return method, path, arguments | {"params": draw(st.dictionaries(texts, texts, max_size=1))}


async def test_no_text_breaks_the_gateway_or_changes_anything(live: Live, tmp_path: Path) -> None:
    await live.make_ready("a")
    async with live.worker, live.gateway() as plane:
        before = await dump(live.database, but=REPORTED)
        await asyncio.to_thread(_offend, str(plane.client.base_url), live.key)
        assert await dump(live.database, but=REPORTED) == before
        assert await plane.serves("bot")


def _offend(url: str, key: str) -> None:
    bearer = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, timeout=60) as client:

        @settings(max_examples=CASES, **OPTIONS)
        @given(hostile_requests())
        def check(request: tuple[str, str, dict[str, Any]]) -> None:
            method, path, arguments = request
            arguments["headers"] = bearer | arguments["headers"]
            # Headers with line ends do not leave the client.
            with contextlib.suppress(httpx.LocalProtocolError):
                answer = client.request(method, path, **arguments)
                assert answer.status_code < 500, (request, answer.text)
                assert "x-injected" not in answer.headers

        check()


GRAMMARS = scaled(50, 5_000)
CHAT = '"messages":[{"role":"user","content":"x"}]'
TOOL = '{"type":"function","function":{"name":"f","strict":true,"parameters":%s}}'
SCHEMA_FIELDS = [
    ("/v1/completions", '"prompt":"x","guided_json":%s'),
    ("/v1/completions", '"prompt":"x","structured_outputs":{"json":%s}'),
    (
        "/v1/chat/completions",
        CHAT + ',"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":%s}}',
    ),
    ("/v1/chat/completions", CHAT + ',"tool_choice":"required","tools":[' + TOOL + "]"),
    (
        "/v1/responses",
        '"input":"x","text":{"format":{"type":"json_schema","name":"x","schema":%s}}',
    ),
    (
        "/v1/messages",
        CHAT + ',"max_tokens":1,"tool_choice":{"type":"any"},'
        '"tools":[{"name":"f","input_schema":%s}]',
    ),
]
EXPRESSION_FIELDS = [
    ("/v1/completions", '"prompt":"x","guided_regex":%s'),
    ("/v1/completions", '"prompt":"x","structured_outputs":{"regex":%s}'),
]
GRAMMAR_FIELDS = [
    ("/v1/completions", '"prompt":"x","guided_grammar":%s'),
    ("/v1/completions", '"prompt":"x","structured_outputs":{"grammar":%s}'),
]
held_requests = st.one_of(
    st.tuples(st.sampled_from(SCHEMA_FIELDS), schemas),
    st.tuples(st.sampled_from(SCHEMA_FIELDS[:2]), schemas.map(json.dumps)),
    st.tuples(st.sampled_from(EXPRESSION_FIELDS), expressions.map(json.dumps)),
    st.tuples(st.sampled_from(GRAMMAR_FIELDS), larks.map(json.dumps)),
)


@pytest.mark.full
async def test_no_grammar_ends_the_gateway(live: Live, dsn: str) -> None:
    """Of growing size and depth, sent to a gateway in a process that may die."""
    await live.make_ready("a")
    gateway = live.process(dsn)
    async with live.worker:
        await gateway.start()
        await asyncio.to_thread(_constrain, gateway.url, live.key)
        assert gateway.is_running
        await gateway.stop()


def _constrain(url: str, key: str) -> None:
    bearer = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, timeout=60, headers=bearer) as client:

        @settings(max_examples=GRAMMARS, **OPTIONS)
        @given(held_requests)
        def check(request: tuple[tuple[str, str], str]) -> None:
            (path, fields), held = request
            body = f'{{"model":"bot",{fields.replace("%s", held)}}}'
            answer = client.post(path, content=body)
            assert answer.status_code < 500, (path, body[:500], answer.text)

        check()
