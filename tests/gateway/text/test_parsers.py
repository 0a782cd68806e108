"""Parsers of answers: what each format means, however the text is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.request import Tool
from gateway.text.parsers.answer_form import AnswerForm, form_of
from gateway.text.parsers.gemma import FUNCTION_GEMMA
from gateway.text.parsers.parser import (
    IdentityParser,
    Parser,
    Part,
    Reasoning,
    Text,
    ToolCall,
    join_parts,
)
from store.records import ToolFormat

TOOLS = [
    Tool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "places": {"type": "array", "items": {"type": "string"}},
                "exact": {"type": "boolean"},
            },
        },
    ),
    Tool(name="list-all", parameters={"type": "object", "properties": {}}),
]
ARGUMENTS: dict[str, Any] = {
    "city": 'B"e\\rn\n<ü>',
    "days": 3,
    "note": None,
    "places": ["a", "{b}"],
    "exact": True,
}
FORMATS: list[ToolFormat] = [
    *("generic", "hermes", "qwen_xml", "llama_json"),
    *("pythonic", "mistral", "gemma", "gemma4"),
]


def make(calls: ToolFormat, *, thinks: bool = False, **options: Any) -> Parser:
    return AnswerForm(calls, thinks).parser(TOOLS, **options)


def write(calls: ToolFormat, *made: tuple[str, dict[str, Any]]) -> str:
    """The calls as a model of the format writes them."""
    one = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in made]
    match calls:
        case "generic" | "hermes":
            return "\n".join(
                f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
                for name, text in one
            )
        case "qwen_xml":
            return "\n".join(
                f"<tool_call>\n<function={name}>\n"
                + "".join(
                    f"<parameter={key}>\n{xml_value(value)}\n</parameter>\n"
                    for key, value in arguments.items()
                )
                + "</function>\n</tool_call>"
                for name, arguments in made
            )
        case "llama_json":
            return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in one)
        case "pythonic":
            written = [
                f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
                for name, arguments in made
            ]
            return f"[{', '.join(written)}]"
        case "mistral":
            written = [f'{{"name": "{name}", "arguments": {text}}}' for name, text in one]
            return f"[TOOL_CALLS][{', '.join(written)}]"
        case "gemma":
            return "".join(
                f"<start_function_call>call:{name}{gemma_value(arguments, '<escape>')}"
                "<end_function_call>"
                for name, arguments in made
            )
        case "gemma4":
            quote = '<|"|>'
            return "".join(
                f"<|tool_call>call:{name}{gemma_value(arguments, quote)}<tool_call|>"
                for name, arguments in made
            )


def xml_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def gemma_value(value: Any, quote: str) -> str:
    match value:
        case str():
            return quote + value + quote
        case dict():
            items = [f"{key}:{gemma_value(each, quote)}" for key, each in value.items()]  # pyright: ignore
            return "{" + ",".join(items) + "}"
        case list():
            return "[" + ",".join(gemma_value(each, quote) for each in value) + "]"  # pyright: ignore
        case _:
            return json.dumps(value)


def parse(parser: Parser, pieces: list[str], *, is_cut: bool = False) -> list[Part]:
    """All parts, neighbours of one kind joined."""
    found: list[Part] = []
    pushed = [part for piece in pieces for part in parser.push(piece)]
    for part in pushed + parser.finish(is_cut=is_cut):
        found[-1:] = join(found[-1], part) if found else [part]
    return found


def join(first: Part, second: Part) -> list[Part]:
    match first, second:
        case Text(), Text():
            return [Text(first.text + second.text)]
        case Reasoning(), Reasoning():
            return [Reasoning(first.text + second.text)]
        case ToolCall(), ToolCall() if first.index == second.index:
            assert not second.name, "a name is given once"
            return [ToolCall(first.index, first.name, first.arguments + second.arguments)]
        case _:
            return [first, second]


def read(calls: ToolFormat, text: str) -> list[Any]:
    """Parts with the arguments of calls decoded."""
    return [
        (part.index, part.name, json.loads(part.arguments)) if isinstance(part, ToolCall) else part
        for part in parse(make(calls), [text])
    ]


BOTH = (("get_weather", ARGUMENTS), ("list-all", {}))


@pytest.mark.parametrize("calls", FORMATS)
def test_calls_are_read_back(calls: ToolFormat) -> None:
    expected = [(0, "get_weather", ARGUMENTS), (1, "list-all", {})]
    assert read(calls, write(calls, *BOTH)) == expected
    assert read(calls, "\n" + write(calls, *BOTH) + "\n") == expected


TAGGED: list[ToolFormat] = ["generic", "hermes", "qwen_xml", "mistral", "gemma", "gemma4"]


@pytest.mark.parametrize("calls", TAGGED)
def test_text_before_calls_is_the_answer(calls: ToolFormat) -> None:
    text = "I look <it> up.\n\n" + write(calls, ("get_weather", {"city": "Bern"}))
    expected = [Text("I look <it> up."), (0, "get_weather", {"city": "Bern"})]
    assert read(calls, text) == expected


@pytest.mark.parametrize(
    ("calls", "text", "arguments"),
    [
        ("hermes", '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "id": 7, "name": "f"}', {"a": 1}),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>', {"a": "\n"}),
        ("generic", '{"name": "get_weather", "arguments": {"a": [1, "}"]}}', {"a": [1, "}"]}),
        ("llama_json", '<|python_tag|>{"name": "get_weather", "parameters": {}}', {}),
        ("llama_json", '{"type": "function", "name": "get_weather", "parameters": {}}', {}),
        ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"a": 1}', {"a": 1}),
        ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"a": 1}', {"a": 1}),
        ("mistral", '[TOOL_CALLS]get_weather{"a": 1}', {"a": 1}),
        ("pythonic", "<|python_start|>[get_weather(a=true, b={'c': (1,)})]<|python_end|>",
         {"a": True, "b": {"c": [1]}}),
        ("pythonic", "[get_weather(a=Bern)]", {"a": "Bern"}),
        ("pythonic", '[get_weather(**{"a": "\\/"})]', {"a": "/"}),
        ("gemma", '<start_function_call>call:f{ "a": [{"b": 1}]}<end_function_call>',
         {"a": [{"b": 1}]}),
        ("gemma", "<start_function_call>call:f{}<end_function_call>", {}),
        ("qwen_xml", "<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n</function>",
         {"days": "many"}),
        ("qwen_xml", "<function=get_weather>\n<parameter=note>\n7\n</parameter>\n</function>",
         {"note": "7"}),
        ("qwen_xml", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', {"a": 1}),
        ("qwen_xml", '<function=f>\n{"a": 1}\n</function>', {"a": 1}),
    ],
)  # fmt: skip
def test_other_ways_to_write_a_call(calls: ToolFormat, text: str, arguments: Any) -> None:
    (call,) = read(calls, text)
    assert call[2] == arguments


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ("hermes", "<tool_call>no</tool_call>"),
        ("hermes", '<tool_call>{"no name": 1}'),
        ("hermes", '{"name": "get_weather", "arguments": {}}'),
        ("generic", '{"name": "Anna", "arguments": {}}'),
        ("generic", '{"name": "get_weather", "age": 3}'),
        ("generic", "<tool"),
        ("llama_json", '[1, {"name": "get_weather"}]'),
        ("llama_json", '{"answer": {"name": "get_weather", "parameters": {}}}'),
        ("pythonic", "[other(a=1)]"),
        ("pythonic", "[1, 2]"),
        ("mistral", "[TOOL_CALLS]"),
        ("gemma", "<start_function_call>call{"),
        ("qwen_xml", "<function="),
    ],
)
def test_what_is_no_call_is_text(calls: ToolFormat, text: str) -> None:
    assert parse(make(calls), [text]) == [Text(text)]


@pytest.mark.parametrize("calls", FORMATS)
def test_a_call_that_is_cut_off_is_given_as_far_as_it_came(calls: ToolFormat) -> None:
    """Nothing is made up, and nothing is given twice."""
    whole = write(calls, ("get_weather", ARGUMENTS))
    (call,) = parse(make(calls), [whole])
    assert isinstance(call, ToolCall)
    for end in range(len(whole)):
        parts = parse(make(calls), [whole[:end]])
        assert len(parts) <= 1
        for part in parts:
            match part:
                case ToolCall(0, "get_weather", arguments):
                    assert call.arguments.startswith(arguments)
                case _:
                    assert part == Text(whole[:end])
        cut = parse(make(calls), [whole[:end]], is_cut=True)
        assert cut == [part for part in parts if isinstance(part, ToolCall)]


@pytest.mark.parametrize(
    ("calls", "text", "shown"),
    [
        ("hermes", "Let me see.\n<tool_c", "Let me see.\n"),
        ("hermes", 'See.\n<tool_call>{"na', "See."),
        ("hermes", "if a < b", "if a < b"),
        ("hermes", "<tool_call>no", "<tool_call>no"),
        ("generic", '{"name": "Anna"', '{"name": "Anna"'),
        ("generic", '{"name": "Ann', '{"name": "Ann'),
        ("generic", '{"name": "get_w', ""),
        ("llama_json", '{"city": "Be', '{"city": "Be'),
        ("pythonic", "[1, 2", "[1, 2"),
        ("pythonic", "[get_wea", ""),
    ],
)
def test_the_beginning_of_a_call_that_is_cut_off_is_no_text(
    calls: ToolFormat, text: str, shown: str
) -> None:
    """What cannot become a call is text all the same."""
    for pieces in ([text], list(text)):
        assert parse(make(calls), pieces, is_cut=True) == ([Text(shown)] if shown else [])


def test_the_beginning_of_a_marker_ends_a_thought_that_is_cut_off() -> None:
    whole = "<think>\nHm, so</thi"
    assert parse(make("hermes", thinks=True), [whole], is_cut=True) == [Reasoning("Hm, so")]
    assert parse(make("hermes", thinks=True), ["<thin"], is_cut=True) == []


def test_arguments_are_given_as_they_come() -> None:
    parser = make("hermes")
    assert parser.push('<tool_call>{"name": "f", "arguments": {"a') == [
        ToolCall(0, "f", ""),
        ToolCall(0, "", '{"a'),
    ]
    assert parser.push('": "b') == [ToolCall(0, "", '": "b')]


def test_text_is_given_as_it_comes() -> None:
    for calls in TAGGED:
        parser = make(calls)
        assert parse_piece(parser, "a ") == "a"
        assert parse_piece(parser, "b") == " b"


def parse_piece(parser: Parser, piece: str) -> str:
    return "".join(part.text for part in parser.push(piece) if isinstance(part, Text))


def test_thoughts() -> None:
    call = write("hermes", ("list-all", {}))
    whole = f"<think>\nHm, <tool_call>?\n</think>\n\nWell.\n{call}"
    expected = [Reasoning("Hm, <tool_call>?"), Text("Well."), ToolCall(0, "list-all", "{}")]
    assert parse(make("hermes", thinks=True), [whole]) == expected
    begun = whole.removeprefix("<think>")
    assert parse(make("hermes", thinks=True, in_thought=True), [begun]) == expected
    assert parse(make("hermes", thinks=True), ["\n <thin"]) == [Text("\n <thin")]
    assert parse(make("hermes", thinks=True), ["<think>on and on"]) == [Reasoning("on and on")]
    assert parse(AnswerForm(has_thoughts=True).parser([]), [call]) == [Text(call)]


@pytest.mark.parametrize("calls", FORMATS)
def test_one_call_where_no_more_are_wanted(calls: ToolFormat) -> None:
    parser = make(calls, is_parallel=False)
    (call,) = parse(parser, [write(calls, *BOTH)])
    assert isinstance(call, ToolCall) and call.name == "get_weather"
    assert parser.is_over


MARKS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"),
    *("<function=get_weather>", "<parameter=city>", "</parameter>", "</function>"),
    *("<start_function_call>call:", "<end_function_call>", "<escape>", "get_weather", "("),
    *('{"name": "get_weather", "arguments": ', '{"name": "get_weather", "parameters": {"a": '),
    *("[", "]", "{", "}", '"', "'", "\\", ",", ":", ")", " ", "\n", "=", "1", "null", "x" * 150),
    *("<|python_tag|>", " " * 70, "<|python_start|>", '"city"', "<", "</", "**"),
]  # fmt: skip


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("calls", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_parts_do_not_depend_on_the_pieces(calls: ToolFormat, thinks: bool, data: Any) -> None:
    """Of calls as they should be, cut off, mixed up, or none at all."""
    recorded = "Well\n" * data.draw(st.booleans()) + write(calls, *BOTH)
    pieces = st.one_of(st.sampled_from(MARKS), st.text(max_size=4), st.just(recorded))
    whole = "".join(data.draw(st.lists(pieces, max_size=12)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=8)))
    some = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    is_cut = data.draw(st.booleans())
    expected = parse(make(calls, thinks=thinks), [whole], is_cut=is_cut)
    assert parse(make(calls, thinks=thinks), some, is_cut=is_cut) == expected
    assert parse(make(calls, thinks=thinks), list(whole), is_cut=is_cut) == expected


def test_the_identity_parser_gives_all_text() -> None:
    assert parse(IdentityParser(), ["<tool_call>", "", "{}"]) == [Text("<tool_call>{}")]


@pytest.mark.parametrize(
    ("template", "calls"),
    [
        ("{{ messages }}", "generic"),
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ tools }} <tool_call> <function=", "qwen_xml"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} <|python_tag|>", "llama_json"),
        ("{{ tools }} [func_name1(params_name1=params_value1", "pythonic"),
        ("{{ tools }} <start_function_call>", "gemma"),
    ],
)
def test_a_template_tells_the_format(template: str, calls: ToolFormat) -> None:
    assert form_of(template, shows_tools="tools" in template) == AnswerForm(calls)


VALUES: dict[str, list[Any]] = {
    "integer": [3, 0, -7],
    "number": [0.5, 3],
    "boolean": [True, False],
    "null": [None],
    "string": ["3", "true", "null", "[1]", "a b", " x", ""],
    "array": [[], [1, "a", None, True]],
    "object": [{}, {"a": {"b": [1.5, False]}}],
}
FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "type": lambda kind, _: {"type": kind},
    "types": lambda kind, _: {"type": [kind]},
    "ref": lambda kind, _: {"$ref": f"#/$defs/{kind}"},
    "two refs": lambda kind, _: {"$ref": f"#/$defs/ref to {kind}"},
    "allOf": lambda kind, _: {"allOf": [{"description": "d"}, {"$ref": f"#/$defs/{kind}"}]},
    "anyOf": lambda kind, _: {"anyOf": [{"type": kind}, {"$ref": f"#/$defs/{kind}"}]},
    "oneOf": lambda kind, _: {
        "oneOf": [{"type": kind, "title": "t"}, {"const": None, "type": kind}]
    },
    "enum": lambda _, value: {"enum": [value]},
    "const": lambda _, value: {"const": value},
}
DEFS = {kind: {"type": kind} for kind in VALUES} | {
    f"ref to {kind}": {"$ref": f"#/$defs/{kind}"} for kind in VALUES
}


def written_values(value: Any) -> list[str]:
    """A value as the models write it, in JSON or in Python."""
    return [value] if isinstance(value, str) else [json.dumps(value), repr(value)]


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("form", FORMS)
def test_plain_text_is_read_by_the_resolved_schema(form: str, kind: str) -> None:
    for value in VALUES[kind]:
        schema = FORMS[form](kind, value)
        wholes: list[dict[str, Any]] = [
            {"properties": {"a": schema}, "$defs": DEFS},
            {"$ref": "#/$defs/whole", "$defs": DEFS | {"whole": {"properties": {"a": schema}}}},
            {"allOf": [{"properties": {"a": schema}}], "$defs": DEFS},
            {"additionalProperties": schema, "$defs": DEFS},
        ]
        for parameters in wholes:
            for written in written_values(value):
                assert argument(written, parameters) == value, (parameters, written)


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({}, "3", "3"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "True", "True"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "3", "3"),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"items": {"type": "integer"}}, "[3]", [3]),
        ({"properties": {"b": {}}}, "{'b': True}", {"b": True}),
        ({"type": "integer"}, "many", "many"),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"$ref": "#/$defs/none"}, "3", "3"),
        ({"$ref": "#/properties/a"}, "3", "3"),
    ],
)
def test_plain_text_of_other_schemas(schema: Any, written: str, value: Any) -> None:
    assert argument(written, {"properties": {"a": schema}}) == value


def test_a_schema_of_exponential_size_is_read_in_parts() -> None:
    defs: dict[str, Any] = {"d0": {"type": "integer"}}
    for number in range(1, 40):
        ref = {"$ref": f"#/$defs/d{number - 1}"}
        defs[f"d{number}"] = {"anyOf": [ref, ref]}
    schema = {"properties": {"a": {"$ref": "#/$defs/d39"}}, "$defs": defs}
    assert argument("3", schema) == "3"


def argument(written: str, parameters: dict[str, Any]) -> Any:
    """The argument `a` of a call that Qwen wrote."""
    parser = AnswerForm("qwen_xml").parser([Tool(name="f", parameters=parameters)])
    text = f"<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>"
    (call,) = join_parts([*parser.push(text), *parser.finish()])
    assert isinstance(call, ToolCall)
    return json.loads(call.arguments)["a"]


@pytest.mark.parametrize(("written", "value"), [("True", True), ("None", None), ("no", "no")])
def test_gemma_s_scalars_may_be_those_of_python(written: str, value: Any) -> None:
    form = AnswerForm("gemma").parser([Tool(name="f")])
    begin, end = FUNCTION_GEMMA.begin, FUNCTION_GEMMA.end
    text = f"{begin}call:f{{a:{written}}}{end}"
    (call,) = join_parts([*form.push(text), *form.finish()])
    assert isinstance(call, ToolCall) and json.loads(call.arguments) == {"a": value}
