"""Each cell of the matrix of features and dialects in docs/use/api-dialects.md holds: of what it
names there is a recorded answer, and where it says no a recorded refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from gateway.dialects.chat_completions import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.messages_fields import MessagesRequest
from gateway.dialects.responses_fields import ResponsesRequest
from store.records import Alias
from tests.gateway import recorded
from tests.gateway.dialects import test_usage_and_limits
from tests.gateway.dialects.cases import HI, PATHS, cases
from tests.gateway.scripts import say, spelled
from tests.gateway.service import Service, snapshot
from tests.gateway.templated import LENGTH, templated_service
from tools.source_tree import ROOT
from workers.wire.protocol import Generate

PAGE = (ROOT / "docs/use/api-dialects.md").read_text()
PARAMETERS = (ROOT / "docs/use/api-parameters.md").read_text()
COLUMNS = {"chat": "chat", "completions": "text", "Messages": "messages", "Responses": "responses"}
"""Names of cases, by column of the page; other columns have the same name."""
SCHEMAS = {
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
    "Messages": MessagesRequest,
    "Responses": ResponsesRequest,
}
FIELDS: dict[str, str] = {
    "streamed or whole": "stream",
    "input": "",
    "answers per request": "n",
    "stop strings": "stop",
    "log-probabilities": "logprobs",
    "tools": "tools",
    "reasoning": "",
    "JSON Schema": "response_format",
    "continuing a begun answer": "",
    "cached prompt tokens": "",
    "images, audio, files": "images",
}
"""Features whose cells are proved by recorded requests, each with the field that is refused by name
where a dialect has none for it; empty: what a dialect lacks cannot be asked for."""
LIVE = (
    *("adapters, aliases, canaries", "canaries are assigned by", "sampling"),
    *("chat template of an adapter", "counting tokens", "limits, usage, prices", "errors"),
)
"""Features whose cells have a test of their own below."""


def matrix() -> dict[str, dict[str, str]]:
    """The cells by feature and dialect, as the page has them."""
    section = PAGE.split("\n## Dialects\n")[1].split("\n## ")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


MATRIX = matrix()
DIALECTS = list(next(iter(MATRIX.values())))


class Case(NamedTuple):
    body: dict[str, Any]
    exchange: recorded.Exchange


def recorded_of(column: str) -> list[Case]:
    path, _ = PATHS[COLUMNS.get(column, column)]
    exchanges = recorded.read().exchanges
    return [Case(body, exchanges[name]) for name, of, body, _ in cases() if of == path]


def names_in(cell: str) -> list[str]:
    """What the cell names as code."""
    return re.findall(r"`([^`]+)`", cell)


def test_every_row_has_its_check() -> None:
    assert set(MATRIX) == {*FIELDS, *LIVE}
    assert all(list(row) == DIALECTS for row in MATRIX.values())


@pytest.mark.parametrize("column", DIALECTS)
def test_what_a_cell_names_is_recorded_and_what_it_denies_is_refused(column: str) -> None:
    known = recorded_of(column)
    answered = [case for case in known if case.exchange.status == 200]
    told = [json.dumps(case.body) + case.exchange.body for case in answered]
    for feature, field in FIELDS.items():
        cell = MATRIX[feature][column]
        for name in names_in(cell):
            last = name.rpartition(".")[2]
            assert any(f'"{last}"' in text for text in told), (feature, name)
        if field and (cell in ("no", "-", "whole") or (field == "n" and "1" in cell)):
            refused = [
                case.exchange
                for case in known
                if field in case.body and case.exchange.status == 400 and not case.exchange.asked
            ]
            assert any(field in exchange.body for exchange in refused), (feature, field)


def test_sampling_parameters_of_the_page_are_those_of_the_schemas() -> None:
    """The cell names what is taken, or what of the table is not."""
    section = PARAMETERS.split("\n## Sampling parameters\n")[1].split("\n## ")[0]
    table = {
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([a-z_]+)`", line.split("|")[1])
    } - {"logprobs", "top_logprobs"}
    for column, schema in SCHEMAS.items():
        cell = MATRIX["sampling"][column]
        named = set(names_in(cell))
        taken = table - named if cell.startswith("all") else named
        assert set(schema.__struct_fields__) & table == taken
    for column in DIALECTS:
        is_refused = any(
            "temperature" in case.body and case.exchange.status == 400
            for case in recorded_of(column)
        )
        assert column in SCHEMAS or is_refused


@pytest.mark.parametrize("column", DIALECTS)
def test_errors_have_the_dialects_shape(column: str) -> None:
    is_anthropic = MATRIX["errors"][column].startswith("Anthropic's")
    refused = [case for case in recorded_of(column) if case.exchange.status >= 400]
    away = [case.exchange.status for case in refused if case.body["model"] == "elsewhere"]
    assert away == [529 if is_anthropic else 503]
    for case in refused:
        assert ("request_id" in json.loads(case.exchange.body)) is is_anthropic


@pytest.mark.parametrize("column", DIALECTS)
def test_limits(column: str) -> None:
    """Held by the suite that goes through all routes."""
    path, _ = PATHS[COLUMNS.get(column, column)]
    (route,) = [each for each in test_usage_and_limits.METERED.values() if each.path == path]
    assert (route.num_generated > 0) is (MATRIX["limits, usage, prices"][column] == "yes")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The template of Qwen 3; version 3 of the adapter brings its own, and `half` splits."""
    with templated_service(tmp_path_factory.mktemp("matrix")) as service:
        plain = snapshot(service.keys.records, generation=3, max_model_len=LENGTH)
        own = "OWN {{ messages[-1].content }}"
        first, *others = plain.versions
        serving = msgspec.structs.replace(first.serving, chat_template=own)
        first = msgspec.structs.replace(first, serving=serving)
        half = Alias("ten_acme", "support-bot", "half", 7, {7: 50, 3: 50})
        fed = msgspec.structs.replace(
            plain,
            versions=(first, *others),
            aliases=(*plain.aliases, half),
            approved_templates=frozenset({serving.template_digest or ""}),
        )
        service.feed(fed)
        service.worker.script = say("ok")
        yield service


def post(service: Service, path: str, body: dict[str, Any]) -> Any:
    answer = service.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def sent(service: Service, column: str, **fields: Any) -> Generate:
    """What the worker is asked at last."""
    path, body = PATHS[COLUMNS.get(column, column)]
    post(service, path, {"model": "tiny", **body, **fields})
    return service.worker.requests[-1]


@pytest.mark.parametrize("column", DIALECTS)
def test_adapters_aliases_and_canaries(service: Service, column: str) -> None:
    """Half of all go to another version, a caller always to the same."""
    for model, digest in (("support-bot", 7), ("support-bot@staging", 3), ("support-bot@7", 7)):
        adapter = sent(service, column, model=model).adapter
        assert adapter and adapter.digest == f"ten_acme-support-bot-{digest}"
    (name,) = names_in(MATRIX["canaries are assigned by"][column])
    found: set[str] = set()
    for number in range(12):
        field = {"metadata": {"user_id": f"u{number}"}} if "." in name else {name: f"u{number}"}
        asked = [sent(service, column, model="support-bot@half", **field) for _ in range(2)]
        digests = {str(request.adapter) for request in asked}
        assert len(digests) == 1
        found |= digests
    assert len(found) == 2


def test_a_safety_identifier_splits_canaries_as_a_user_does(service: Service) -> None:
    """It keeps a caller on one version, and `user` comes before it."""

    def version(**fields: str) -> str:
        return str(sent(service, "chat", model="support-bot@half", **fields).adapter)

    callers = [f"u{number}" for number in range(12)]
    by_user = [version(user=caller) for caller in callers]
    assert len(set(by_user)) == 2
    assert [version(safety_identifier=caller) for caller in callers] == by_user
    assert [version(safety_identifier="other", user=caller) for caller in callers] == by_user


@pytest.mark.parametrize("column", DIALECTS)
def test_chat_templates_of_adapters(service: Service, column: str) -> None:
    """Version 3 has its own."""
    fields = {"input": None, "messages": HI} if column == "embeddings" else {}
    shown = spelled(sent(service, column, model="support-bot@3", **fields).tokens)
    is_no = MATRIX["chat template of an adapter"][column] in ("no", "-")
    assert shown.startswith("OWN ") is not is_no


@pytest.mark.parametrize(
    "column", [each for each in DIALECTS if names_in(MATRIX["counting tokens"][each])]
)
def test_counted_tokens_are_those_of_the_prompt(service: Service, column: str) -> None:
    (path,) = names_in(MATRIX["counting tokens"][column])
    _, body = PATHS[COLUMNS.get(column, column)]
    asked = {name: body[name] for name in ("messages", "prompt") if name in body}
    if column in ("embeddings", "embed"):
        asked = {"prompt": body["input"] if column == "embeddings" else body["texts"][-1]}
    answer = post(service, path, {"model": "tiny", **asked})
    counted = answer.get("count", answer.get("input_tokens"))
    assert counted == len(sent(service, column).tokens)
