"""Stop strings are searched in the text that an answer shows, in every format and however the text
is cut into pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.parsers.parser import Part, Reasoning, Text, ToolCall, join_parts
from gateway.text.parsers.stopping import StoppingParser
from gateway.text.parsers.thoughts import ThoughtParser
from store.records import ToolFormat
from tests.gateway.text.test_parsers import BOTH, FORMATS, MARKS, make, parse, write
from tests.gateway.text.test_stop_strings import oracle

STOPS = [*MARKS, "\n\n", "}", "in", "\n", ">", "B", "Hm", "city", "get", "all", "text."]
THOUGHT = "<think>\nHm, B in\n\nmind.\n</think>\n\n"


def cut_at_stop(parts: list[Part], stops: list[str]) -> tuple[list[Part], str | None]:
    """The parts of a whole answer up to the first stop string in a text."""
    shown: list[Part] = []
    for part in parts:
        if not isinstance(part, Text):
            shown.append(part)
            continue
        text, matched = oracle(part.text, stops)
        shown += [Text(text)] if text else []
        if matched is not None:
            return shown, matched
    return shown, None


def read(parser: StoppingParser, pieces: list[str]) -> tuple[list[Part], str | None]:
    parts: list[Part] = []
    for piece in pieces:
        if parser.is_over:
            break
        parts += parser.push(piece)
    return join_parts(parts + parser.finish()), parser.matched


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("calls", FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_stop_string_is_found_in_the_answer_alone(
    calls: ToolFormat, thinks: bool, data: Any
) -> None:
    """Of thoughts, texts and calls as they should be, cut off, mixed up, or none at all."""
    recorded = [THOUGHT, "A text.\n\nin B ", write(calls, *BOTH), "B text."]
    pieces = st.one_of(
        st.sampled_from(recorded), st.sampled_from(MARKS), st.text("B}\n <", max_size=4)
    )
    whole = "".join(data.draw(st.lists(pieces, max_size=8)))
    stops = data.draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=8)))
    some = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    expected = cut_at_stop(parse(make(calls, thinks=thinks), [whole]), stops)
    for cut in ([whole], some, list(whole)):
        parser = StoppingParser(make(calls, thinks=thinks), stops, shows_stop=False)
        assert read(parser, cut) == expected


@pytest.mark.parametrize("calls", FORMATS)
def test_calls_and_thoughts_stay_whole(calls: ToolFormat) -> None:
    """Whatever string is in them."""
    whole = THOUGHT + write(calls, *BOTH)
    expected = parse(make(calls, thinks=True), [whole])
    assert {type(part) for part in expected} == {Reasoning, ToolCall}
    stops = sorted({whole[n : n + size] for size in (1, 2, 7) for n in range(len(whole) - size)})
    parser = StoppingParser(make(calls, thinks=True), stops, shows_stop=False)
    assert read(parser, list(whole)) == (expected, None)


def test_no_stop_string_is_found_across_a_call() -> None:
    call = write("hermes", ("list-all", {}))
    parser = StoppingParser(make("hermes"), ["ab"], shows_stop=False)
    assert read(parser, [f"a{call}b, then ab."]) == (
        [Text("a"), ToolCall(0, "list-all", "{}"), Text("b, then ")],
        "ab",
    )


@given(
    thought=st.text("<thin/>\n ab", max_size=12),
    answer=st.text("<th> ab", max_size=4),
    is_begun=st.booleans(),
    is_closed=st.booleans(),
    data=st.data(),
)
def test_tokens_of_a_thought_are_counted(
    thought: str, answer: str, is_begun: bool, is_closed: bool, data: Any
) -> None:
    """Those that spell at least one character between the markers."""
    thought = thought.replace("</think>", "")
    opening = "" if is_begun else "\n<think>"
    whole = opening + thought + ("</think>" + answer if is_closed else "")
    begin, end = len(opening), len(opening + thought)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=9)))
    spans = list(zip([0, *cuts], [*cuts, len(whole)], strict=True))
    parser = ThoughtParser(make("hermes"), is_begun=is_begun)
    for start, stop in spans:
        parser.push(whole[start:stop])
    parser.finish()
    expected = [(a, b) for a, b in spans if a < end and (b > begin or a >= begin)]
    assert parser.num_thought_tokens == len(expected)
