"""Creates grammars that constrain answers with tool calls or thoughts to a format of tool calls.

The parsers in `parsers/` parse the answers that these grammars allow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.request import AllowedTools, NamedTool, Request, Tool
from gateway.text.json_schemas import held_schema
from gateway.text.parsers import json_calls, pythonic, qwen_xml, thoughts
from gateway.text.parsers.answer_form import AnswerForm
from gateway.text.parsers.gemma import FUNCTION_GEMMA, GEMMA_4
from store.records import ToolFormat
from workers.wire import grammars

HELD: dict[ToolFormat, tuple[str, str, str, str]] = {
    "generic": ("<tool_call>", '\n{"name": "%s", "arguments": ', "}\n</tool_call>", "\n"),
    "hermes": ("<tool_call>", '\n{"name": "%s", "arguments": ', "}\n</tool_call>", "\n"),
    "qwen_xml": ("<tool_call>", '\n{"name": "%s", "arguments": ', "}\n</tool_call>", "\n"),
    "llama_json": ("", '{"name": "%s", "parameters": ', "}", "; "),
    "pythonic": ("", "[%s(**", ")]", ""),
    "mistral": (json_calls.MISTRAL_OPEN, '[{"name": "%s", "arguments": ', "}]", ""),
    "gemma": (FUNCTION_GEMMA.begin, "call:%s", FUNCTION_GEMMA.end, "\n"),
    "gemma4": (GEMMA_4.begin, "call:%s", GEMMA_4.end, "\n"),
}
"""Texts of which a constrained call consists, by format: the marker before a call, the text before
its arguments (a JSON object), the text after them, and the text between two calls."""
BARE: dict[ToolFormat, tuple[str, str]] = {
    "llama_json": ("{[", json_calls.LLAMA_TAG),
    "pythonic": ("[", pythonic.OPEN),
}
"""Formats whose calls need no marker, each with the first characters that an answer with a call may
have, and a marker that may precede a call. If calls are constrained, plain text must not begin with
one of these characters, and must not contain the marker."""
CLOSING = (FUNCTION_GEMMA.end, GEMMA_4.end)
MARKERS = (
    *(thoughts.OPEN, thoughts.CLOSE),
    *(opening for opening, *_ in HELD.values() if opening),
    *(marker for _, marker in BARE.values()),
    *CLOSING,
)
"""Markers for which some models have special tokens."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class AnswerRules(msgspec.Struct, frozen=True):
    """Inputs from which the grammar of an answer is made."""

    form: AnswerForm
    in_thought: bool
    tools: list[Tool]
    must_call: bool
    is_parallel: bool
    body: str
    """Grammar of an answer without calls. Empty if any text is allowed."""

    def schema_of(self, tool: Tool) -> dict[str, Any]:
        """Returns the schema that constrains the tool's arguments: the tool's own if the answer
        must call a tool or the tool is strict, otherwise any object."""
        return tool.parameters if self.must_call or tool.strict else ANY_OBJECT


def rules_of(
    request: Request, form: AnswerForm, *, in_thought: bool, body: str
) -> AnswerRules | None:
    """Returns the rules of an answer, or None if any text is allowed. `body` is the grammar of an
    answer without calls, or empty."""
    tools, choice = request.callable_tools, request.tool_choice
    is_forced = request.must_call
    is_limited = isinstance(choice, AllowedTools) or any(tool.strict for tool in tools)
    if not (is_forced or is_limited or (body and (tools or form.has_thoughts))):
        return None
    is_parallel = request.is_parallel
    if isinstance(choice, NamedTool):
        tools, is_parallel = [tool for tool in tools if tool.name == choice.name], False
    return AnswerRules(form, in_thought, tools, is_forced, is_parallel, body)


class HeldGrammar(msgspec.Struct, frozen=True):
    """Grammar that constrains an answer."""

    grammar: str = ""
    """Text that is sent to a worker. Empty if any text is allowed."""
    dropped: frozenset[str] = frozenset()
    """Schema keywords that the grammar does not enforce. Each keyword is prefixed with the name of
    the request field that contains the schema, for example `tools.contains`."""


def grammar_of(rules: AnswerRules, special: Callable[[str], int | None]) -> HeldGrammar:
    """Returns the grammar of an answer. `special` returns the token id of a marker, or None if the
    model has no special token for it. Raises ValueError if a schema is invalid, or if a strict
    schema cannot be enforced."""
    parts: list[dict[str, Any]] = []
    dropped: frozenset[str] = frozenset()
    for number, tool in enumerate(rules.tools):
        arguments, keywords = arguments_grammar(rules, tool)
        dropped |= {f"tools.{keyword}" for keyword in keywords}
        parts.append(_named(f"arguments_{number}", arguments))
    if rules.body:
        parts.append(_named("body", rules.body))
    lines = ["%llguidance {}", *_lines(rules, special)]
    grammar = json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *parts]})
    return HeldGrammar(grammar, dropped)


def arguments_grammar(rules: AnswerRules, tool: Tool) -> tuple[str, frozenset[str]]:
    """Returns the grammar of a tool's arguments, and the keywords that it does not enforce. Raises
    ValueError, which names the tool, if the schema is invalid or a strict one cannot be
    enforced."""
    text = json.dumps(rules.schema_of(tool))
    try:
        held = held_schema(text, is_strict=tool.strict, is_closed=True)
        return grammars.of_json_schema(held.text), held.dropped
    except ValueError as error:
        raise ValueError(f"tool '{tool.name}': {error}") from None


def _named(name: str, grammar: str) -> dict[str, Any]:
    (part,) = json.loads(grammar)["grammars"]
    return {**part, "name": name}


def _lines(rules: AnswerRules, special: Callable[[str], int | None]) -> Sequence[str]:
    def marker(text: str) -> str:
        token = special(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def text_until(name: str, end: str) -> str:
        """Returns a rule that matches any text up to and including the first `end` marker."""
        return f"{name}{'[lazy]' if special(end) is None else ''}: TEXT {marker(end)}"

    before = ""
    if rules.form.has_thoughts:
        before = "thought SPACE?"
        if not rules.in_thought:
            before = f"({marker(thoughts.OPEN)} {before})?"
    lines = [f"start: {before} answer", "TEXT: /(.|\\n)*/", "SPACE: /[ \\n]{1,4}/"]
    lines.append(text_until("thought", thoughts.CLOSE))
    if not rules.tools:
        return [*lines, "answer: @body"]
    opening, before_arguments, after, between = HELD[rules.form.calls]
    calls = [
        f"{json.dumps(before_arguments % tool.name)} @arguments_{number}"
        for number, tool in enumerate(rules.tools)
    ]
    closing = marker(after) if after in CLOSING else json.dumps(after)
    lines.append(f"written: ({' | '.join(calls)}) {closing}")
    call = f"{marker(opening)} written" if opening else "written"
    if rules.must_call or rules.body:
        more = f"({json.dumps(between)} {call})*" if rules.is_parallel and between else ""
        other = "" if rules.must_call else " | @body"
        return [*lines, f"answer: {call} {more}{other}"]
    if rules.form.calls in BARE:
        firsts, tag = BARE[rules.form.calls]
        first = f"/[ \\t\\r\\n]*[^ \\t\\r\\n{re.escape(firsts)}](.|\\n)*/"
        other = f"& ~/(.|\\n)*{re.escape(tag)}(.|\\n)*/" if special(tag) is None else ""
        more = f"({json.dumps(between)} {call})*" if between else ""
        return [
            *lines,
            f"answer: {marker(tag)}? {call} {more} | PLAIN |",
            f"PLAIN: {first} {other}",
        ]
    lines.append(text_until("opening", opening))
    if rules.form.calls != "qwen_xml":
        return [*lines, "answer: (opening written)* TEXT"]
    bare = [
        f"{json.dumps(tool.name + '>')} @arguments_{number}"
        for number, tool in enumerate(rules.tools)
    ]
    return [
        *lines,
        text_until("function", qwen_xml.FUNCTION),
        f"bare: ({' | '.join(bare)}) {json.dumps(qwen_xml.END_OF_FUNCTION)}",
        "answer: (opening written | function bare)* TEXT",
    ]
