"""Parsers of answers: the parts do not depend on how the text is cut into pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.parsers.parser import IdentityParser, Parser, Part, Reasoning, Text, ToolCall

PARSERS: list[Callable[[], Parser]] = [IdentityParser]


def parse(parser: Parser, pieces: list[str]) -> list[Part]:
    """All parts, neighbours of one kind joined."""
    found: list[Part] = []
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.finish():
        found[-1:] = join(found[-1], part) if found else [part]
    return found


def join(first: Part, second: Part) -> list[Part]:
    match first, second:
        case Text(), Text():
            return [Text(first.text + second.text)]
        case Reasoning(), Reasoning():
            return [Reasoning(first.text + second.text)]
        case ToolCall(), ToolCall() if first.index == second.index:
            return [ToolCall(first.index, first.name, first.arguments + second.arguments)]
        case _:
            return [first, second]


@pytest.mark.parametrize("make", PARSERS)
@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.text(alphabet="ab<>{}/ \n", max_size=8), max_size=8))
def test_parts_do_not_depend_on_the_pieces(make: Callable[[], Parser], pieces: list[str]) -> None:
    whole = "".join(pieces)
    assert parse(make(), pieces) == parse(make(), [whole]) == parse(make(), list(whole))


def test_the_identity_parser_gives_all_text() -> None:
    assert parse(IdentityParser(), ["<tool_call>", "", "{}"]) == [Text("<tool_call>{}")]
