"""What the grammar of calls lets a model write, its parser reads back as valid calls."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.request import AllowedTools, NamedTool, Request, Tool
from gateway.text.call_grammars import BARE, HELD, AnswerRules, grammar_of, rules_of
from gateway.text.parsers.answer_form import AnswerForm
from gateway.text.parsers.parser import Part, Reasoning, Text, ToolCall
from tests.doubles import make_tokenizer
from tests.gateway.text.test_parsers import parse, write
from workers.wire import grammars

VOCAB, END = 260, 257
WEATHER = Tool(
    name="get_weather",
    strict=True,
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 5},
            "days": {"type": "integer", "minimum": 0, "maximum": 20},
            "unit": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
)
NOW = Tool(name="now", parameters={"type": "object", "additionalProperties": False})
TOOLS = [WEATHER, NOW]
SCHEMAS = {tool.name: jsonschema_rs.validator_for(tool.parameters) for tool in TOOLS}
BODY = grammars.of_json_schema('{"const": {"x": 1}}')
WRONG = {"city": "Bern", "unit": "K"}
RIGHT = {"city": "Bern", "unit": "C"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    folder: Path = tmp_path_factory.mktemp("tiny")
    make_tokenizer(folder)
    return LLTokenizer(str(folder / "tokenizer.json"), n_vocab=VOCAB, eos_token=END)


def rules(calls: Any, *, thinks: bool = False, must: bool = True, **other: Any) -> AnswerRules:
    defaults = {"in_thought": False, "is_parallel": True, "body": "", "tools": TOOLS}
    return AnswerRules(AnswerForm(calls, thinks), must_call=must, **(defaults | other))


def matcher(tokenizer: LLTokenizer, held_to: AnswerRules) -> LLMatcher:
    grammar = grammar_of(held_to, lambda _: None).grammar
    assert grammars.refusal(grammar) is None
    return LLMatcher(tokenizer, grammar, log_level=0, limits=grammars.limits())


def allows(tokenizer: LLTokenizer, held_to: AnswerRules, text: str) -> bool:
    tokens, found = tokenizer.tokenize_str(text), matcher(tokenizer, held_to)
    return found.validate_tokens(tokens) == len(tokens) and (
        found.consume_tokens(tokens) and found.is_accepting()
    )


def walk(tokenizer: LLTokenizer, held_to: AnswerRules, seed: int) -> str:
    """An answer that a model with random logits writes, which ends as soon as it may."""
    rng, found, tokens = random.Random(seed), matcher(tokenizer, held_to), list[int]()
    while not found.is_stopped():
        bits = np.unpackbits(np.frombuffer(found.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [token for token in np.flatnonzero(bits).tolist() if token < 256]
        if found.is_accepting() and (not allowed or rng.random() < 0.5):
            break
        token = rng.choice(allowed)
        assert found.consume_token(token)
        tokens.append(token)
    return tokenizer.decode_bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("tool", [{"strict": True}, {"strict": False}])
def test_arguments_have_only_declared_properties(
    tokenizer: LLTokenizer, tool: dict[str, bool]
) -> None:
    """Of strict tools, and of other tools whose call is required."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    held_to = rules("hermes", tools=[Tool(name="f", parameters=schema, **tool)])
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert allows(tokenizer, held_to, call % '{"n": 1}')
    assert not allows(tokenizer, held_to, call % '{"n": 1, "m": 1}')
    opened = Tool(name="f", parameters=schema | {"additionalProperties": True}, **tool)
    assert allows(tokenizer, rules("hermes", tools=[opened]), call % '{"n": 1, "m": 1}')


@pytest.mark.parametrize("calls", HELD)
def test_required_calls_are_read_back_and_valid(tokenizer: LLTokenizer, calls: Any) -> None:
    held_to = rules(calls)
    names = set[str]()
    for seed in range(12):
        parts = parse(held_to.form.parser(TOOLS), [walk(tokenizer, held_to, seed)])
        assert parts
        for part in parts:
            assert isinstance(part, ToolCall)
            SCHEMAS[part.name].validate(json.loads(part.arguments))
            names.add(part.name)
    assert names == set(SCHEMAS)


@pytest.mark.parametrize("calls", HELD)
def test_one_call_where_no_more_are_wanted(tokenizer: LLTokenizer, calls: Any) -> None:
    held_to = rules(calls, is_parallel=False)
    for seed in range(4):
        parts: list[Part] = parse(held_to.form.parser(TOOLS), [walk(tokenizer, held_to, seed)])
        assert [type(part) for part in parts] == [ToolCall]


TAGGED = [calls for calls in HELD if calls not in BARE]


def held(calls: Any, name: str, arguments: Any) -> str:
    """A call as the grammar has it: its arguments are JSON."""
    opening, before, after, _ = HELD[calls]
    return f"{opening}{before % name}{json.dumps(arguments)}{after}"


@pytest.mark.parametrize("calls", HELD)
def test_a_strict_tool_is_held_to_its_schema_wherever_it_is_called(
    tokenizer: LLTokenizer, calls: Any
) -> None:
    held_to = rules(calls, must=False)
    right, wrong = (held(calls, "get_weather", each) for each in (RIGHT, WRONG))
    loose = held(calls, "now", {"anything": 1})
    for before in ("", "Well <tool\n") if calls in TAGGED else ("",):
        assert allows(tokenizer, held_to, before + right)
        assert allows(tokenizer, held_to, before + loose)
        assert not allows(tokenizer, held_to, before + wrong)
    assert not allows(tokenizer, held_to, right + "\n" + wrong)
    assert allows(tokenizer, held_to, "It is what [it] {is}.")
    assert allows(tokenizer, held_to, "")
    parser = held_to.form.parser(TOOLS)
    assert parse(parser, [right]) == [ToolCall(0, "get_weather", json.dumps(RIGHT))]


@pytest.mark.parametrize("calls", HELD)
def test_no_other_way_to_write_a_call_escapes_the_schema(
    tokenizer: LLTokenizer, calls: Any
) -> None:
    """What the parser would read as a call of the tool, in the model's own convention."""
    held_to = rules(calls, must=False)
    wrong = write(calls, ("get_weather", WRONG))
    ways = [wrong, f" \n{wrong}", f"Well. {wrong}"]
    if calls in BARE:
        tag = BARE[calls][1]
        ways += [f"{tag}{wrong}", f"Well. {tag}{wrong}"]
        assert allows(tokenizer, held_to, tag + held(calls, "get_weather", RIGHT))
    if calls == "qwen_xml":
        ways.append(wrong.removeprefix("<tool_call>\n"))
    for way in ways:
        if any(isinstance(part, ToolCall) for part in parse(held_to.form.parser(TOOLS), [way])):
            assert not allows(tokenizer, held_to, way), way


@pytest.mark.parametrize("calls", HELD)
def test_markers_may_be_special_tokens(tokenizer: LLTokenizer, calls: Any) -> None:
    opening = BARE[calls][1] if calls in BARE else HELD[calls][0]
    special, held_to = 258, rules(calls, must=False)
    grammar = grammar_of(held_to, lambda marker: special if marker == opening else None).grammar
    for arguments, is_allowed in ((RIGHT, True), (WRONG, False)):
        call = held(calls, "get_weather", arguments).removeprefix(opening)
        for before in ("", "Well. ") if calls in TAGGED else ("",):
            found = LLMatcher(tokenizer, grammar, log_level=0, limits=grammars.limits())
            texts = (tokenizer.tokenize_str(text) for text in (before, call))
            tokens = [*next(texts), special, *next(texts)]
            assert (found.validate_tokens(tokens) == len(tokens)) == is_allowed


def test_a_function_without_its_tag_is_held_to_its_schema(tokenizer: LLTokenizer) -> None:
    """As Qwen 3 Coder writes it now and then."""
    held_to = rules("qwen_xml", must=False)
    text = "So:\n<function=get_weather>{}</function>"
    right, wrong = (text.replace("{}", json.dumps(each)) for each in (RIGHT, WRONG))
    assert allows(tokenizer, held_to, right) and not allows(tokenizer, held_to, wrong)
    assert parse(held_to.form.parser(TOOLS), [right]) == [
        Text("So:"),
        ToolCall(0, "get_weather", json.dumps(RIGHT)),
    ]


def test_a_thought_is_free_and_what_follows_is_held(tokenizer: LLTokenizer) -> None:
    call, thought = write("hermes", ("now", {})), "Hm, <tool_call>?</think>\n\n"
    held_to = rules("hermes", thinks=True)
    assert allows(tokenizer, held_to, "<think>" + thought + call)
    assert allows(tokenizer, held_to, call)
    assert not allows(tokenizer, held_to, "<think>" + thought + "now()")
    begun = rules("hermes", thinks=True, in_thought=True)
    assert allows(tokenizer, begun, thought + call)
    assert not allows(tokenizer, begun, call)
    schema = rules("hermes", thinks=True, tools=[], must=False, body=BODY)
    assert allows(tokenizer, schema, "<think>" + thought + '{"x":1}')
    assert not allows(tokenizer, schema, "<think>" + thought + '{"x":2}')
    parser = schema.form.parser([])
    assert parse(parser, ["<think>" + thought + '{"x":1}']) == [
        Reasoning("Hm, <tool_call>?"),
        Text('{"x":1}'),
    ]


@pytest.mark.parametrize("calls", HELD)
def test_only_allowed_tools_are_called(tokenizer: LLTokenizer, calls: Any) -> None:
    """A text is an answer too, unless a call is required. No tool here is strict."""
    other = msgspec.structs.replace(WEATHER, strict=False)
    form = AnswerForm(calls)

    def held_to(must: bool) -> AnswerRules:
        request = asked(tools=[other, NOW], tool_choice=AllowedTools(("now",), must))
        found = rules_of(request, form, in_thought=False, body="")
        assert found
        return found

    right, wrong = held(calls, "now", {}), held(calls, "get_weather", RIGHT)
    for must in (False, True):
        assert allows(tokenizer, held_to(must), right)
        assert not allows(tokenizer, held_to(must), wrong)
        assert not allows(tokenizer, held_to(must), write(calls, ("get_weather", RIGHT)))
        assert allows(tokenizer, held_to(must), "It is late.") is not must


def test_an_answer_by_a_schema_may_be_a_call(tokenizer: LLTokenizer) -> None:
    held_to = rules("hermes", must=False, body=BODY)
    assert allows(tokenizer, held_to, '{"x":1}')
    assert allows(tokenizer, held_to, write("hermes", ("now", {})))
    assert not allows(tokenizer, held_to, "anything")


def asked(**fields: Any) -> Request:
    return Request(model="tiny", **{"tools": TOOLS, **fields})


def test_which_requests_are_held_to_rules() -> None:
    hermes = AnswerForm("hermes")

    def found(form: AnswerForm = hermes, body: str = "", **fields: Any) -> AnswerRules | None:
        return rules_of(asked(**fields), form, in_thought=False, body=body)

    assert found(tools=[NOW]) is None
    assert found(tool_choice="none") is None
    assert found(tools=[], body=BODY) is None
    strict = found()
    assert strict and not strict.must_call
    named = found(tool_choice=NamedTool("now"))
    assert named and named.must_call and named.tools == [NOW] and not named.is_parallel
    assert found(AnswerForm("hermes", True), BODY, tools=[])
