"""Determines from a chat template how a model writes tool calls and thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from gateway.request import Tool
from gateway.text.parsers import gemma, json_calls, pythonic, thoughts
from gateway.text.parsers.gemma import FUNCTION_GEMMA, GEMMA_4, GemmaParser
from gateway.text.parsers.json_calls import HermesParser, LlamaJsonParser, MistralParser
from gateway.text.parsers.parser import (
    CallsOnlyParser,
    IdentityParser,
    Parser,
    SingleCallParser,
)
from gateway.text.parsers.pythonic import PythonicParser
from gateway.text.parsers.qwen_xml import QwenXmlParser
from gateway.text.parsers.thoughts import ThoughtParser
from store.records import ToolFormat

FINGERPRINTS: tuple[tuple[str, ToolFormat], ...] = (
    ("<function=", "qwen_xml"),
    (FUNCTION_GEMMA.begin, "gemma"),
    (GEMMA_4.begin, "gemma4"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("func_name1(params_name1=params_value1", "pythonic"),
    ('"parameters": ', "llama_json"),
    ("<|python_tag|>", "llama_json"),
    ("<|start_header_id|>", "llama_json"),
)
"""Texts by which the format of tool calls is recognised in a chat template. If a template contains
several of them, the first one in this list decides."""

SPECIAL_MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    "llama_json": (json_calls.LLAMA_TAG,),
    "pythonic": (pythonic.OPEN, pythonic.CLOSE),
    "mistral": (json_calls.MISTRAL_OPEN, json_calls.MISTRAL_CALL_ID, json_calls.MISTRAL_ARGS),
    "gemma": tuple(gemma.FUNCTION_GEMMA),
    "gemma4": tuple(gemma.GEMMA_4),
}
"""Markers of each format that may be special tokens. The detokenizer must show them, because it
omits other special tokens."""


class AnswerForm(msgspec.Struct, frozen=True):
    calls: ToolFormat = "generic"
    has_thoughts: bool = False

    def parser(
        self,
        tools: Sequence[Tool],
        *,
        is_parallel: bool = True,
        must_call: bool = False,
        in_thought: bool = False,
        continues_thought: bool = False,
    ) -> Parser:
        """Returns a parser for one answer. `tools` are the tools that may be called. `must_call`
        means that a grammar allows only calls. `in_thought` means that the prompt ends inside a
        thought, and `continues_thought` that it has a part of the thought's text."""
        parser = IdentityParser()
        if tools:
            parser = self._call_parser(tools)
            if not is_parallel:
                parser = SingleCallParser(parser)
            if must_call:
                parser = CallsOnlyParser(parser)
        if not self.has_thoughts:
            return parser
        return ThoughtParser(parser, is_begun=in_thought, is_continued=continues_thought)

    def markers(self, tools: Sequence[Tool]) -> frozenset[str]:
        """Returns the special tokens that the parser needs to see in the text."""
        found: tuple[str, ...] = (thoughts.OPEN, thoughts.CLOSE) if self.has_thoughts else ()
        if tools:
            found += SPECIAL_MARKERS.get(self.calls, json_calls.HERMES_TAGS)
        return frozenset(found)

    def _call_parser(self, tools: Sequence[Tool]) -> Parser:
        names = {tool.name for tool in tools}
        match self.calls:
            case "generic":
                # A strict tool may be called only after `<tool_call>`, because only there does a
                # grammar constrain the call to the tool's schema.
                return HermesParser({tool.name for tool in tools if not tool.strict})
            case "hermes":
                return HermesParser()
            case "qwen_xml":
                return QwenXmlParser(tools)
            case "llama_json":
                return LlamaJsonParser(names)
            case "pythonic":
                return PythonicParser(names)
            case "mistral":
                return MistralParser()
            case "gemma":
                return GemmaParser(FUNCTION_GEMMA)
            case "gemma4":
                return GemmaParser(GEMMA_4)


@lru_cache(256)
def form_of(template: str, *, shows_tools: bool) -> AnswerForm:
    """Returns the form in which models with this chat template write their answers."""
    has_thoughts = thoughts.CLOSE in template
    if shows_tools:
        for mark, calls in FINGERPRINTS:
            if mark in template:
                return AnswerForm(calls, has_thoughts)
    return AnswerForm("generic", has_thoughts)
