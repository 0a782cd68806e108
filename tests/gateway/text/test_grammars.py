"""Grammars of a gateway: which are compiled, and for whom."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.exceptions import InvalidRequest
from gateway.request import Constraint, Tool
from gateway.text.call_grammars import AnswerRules
from gateway.text.grammars import Grammars, GrammarUser
from gateway.text.parsers.answer_form import AnswerForm
from tests.hostile_grammars import DOUBLES, chain, pattern

ACME = GrammarUser("req_1", "acme", "acme")


@pytest.fixture
async def grammars() -> AsyncIterator[Grammars]:
    grammars = Grammars()
    yield grammars
    grammars.close()


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    records = [record.__dict__ for record in caplog.records if record.msg == "compiling a grammar"]
    return [(record["request_id"], record["tenant"]) for record in records]


async def test_a_request_is_logged_before_its_grammar_is_compiled(
    grammars: Grammars, caplog: pytest.LogCaptureFixture
) -> None:
    """A cached grammar is not compiled."""
    constraint = Constraint("regex", "a+", "guided_regex")
    with caplog.at_level(logging.INFO):
        found = [await grammars.of(constraint, ACME) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert lines(caplog) == [("req_1", "acme")]


async def test_a_refused_grammar_is_refused_again(grammars: Grammars) -> None:
    """Without another compilation."""
    text = chain(DOUBLES["allOf"], 30, pattern("a"))
    constraint = Constraint("json_schema", text, "guided_json")
    with pytest.raises(InvalidRequest) as first:
        await grammars.of(constraint, ACME)
    grammars.close()
    with pytest.raises(InvalidRequest) as second:
        await grammars.of(constraint, ACME)
    assert str(first.value) == str(second.value)
    assert first.value.param == "guided_json" and first.value.code == "unsupported_constraint"


async def test_the_loop_goes_on_while_a_grammar_is_compiled(grammars: Grammars) -> None:
    text = chain(DOUBLES["allOf"], 30, pattern("a"))
    compiling = asyncio.create_task(
        grammars.of(Constraint("json_schema", text, "guided_json"), ACME)
    )
    num_turns = 0
    while not compiling.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 20
    assert isinstance(compiling.exception(), InvalidRequest)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": 5}}},
        {"type": "object", "properties": {"a": {"pattern": "x" * 5000}}},
        {"$ref": "https://elsewhere.example/x"},
        {"type": "object", "properties": {"a": {"uniqueItems": True}}},
        json.loads(chain(DOUBLES["allOf"], 30, pattern("a"))),
    ],
)
async def test_a_schema_that_cannot_be_used_is_refused_by_its_tools_name(
    grammars: Grammars, schema: dict[str, Any]
) -> None:
    tools = [
        Tool(name=name, parameters=each, strict=True)
        for name, each in (("a", {}), ("guilty", schema), ("b", {}))
    ]
    rules = AnswerRules(AnswerForm("hermes"), False, tools, False, True, "")
    with pytest.raises(InvalidRequest, match="ool 'guilty': ") as refused:
        await grammars.of_rules(rules, lambda _: None, ACME)
    assert refused.value.param == "tools" and len(str(refused.value)) < 800


async def test_tools_with_a_chain_of_references_are_refused(grammars: Grammars) -> None:
    """Only where calls are held to their schemas."""
    tool = Tool(name="f", parameters=json.loads(chain("%s", 2_000)))
    for must_call in (False, True):
        rules = AnswerRules(AnswerForm("hermes"), False, [tool], must_call, True, "")
        compiling = grammars.of_rules(rules, lambda _: None, ACME)
        if not must_call:
            assert await compiling
            continue
        with pytest.raises(InvalidRequest, match="2003") as refused:
            await compiling
        assert refused.value.param == "tools"
