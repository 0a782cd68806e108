"""The polynomial matcher accepts what `re` accepts."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.errors import AdapterRejected
from adapters.format.patterns import PatternMatcher
from adapters.format.strict_json import decode_object

NAMES = st.text("ab.", max_size=7)

PATTERNS = st.recursive(
    st.sampled_from(["a", "b", r"\.", ".", "[ab]", "[^a]", r"\w", r"\b", "^", "$", ""]),
    lambda inner: (
        st.builds("{}{}".format, inner, inner)
        | st.builds("(?:{}|{})".format, inner, inner)
        | st.builds("({}){}".format, inner, st.sampled_from(["*", "+", "?", "*?", "{1,2}"]))
        | st.builds("(?={})".format, inner)
        | st.builds("(?!{})".format, inner)
    ),
    max_leaves=8,
)


@settings(max_examples=600, deadline=None)
@given(pattern=PATTERNS, text=NAMES)
def test_agrees_with_re(pattern: str, text: str) -> None:
    matcher = PatternMatcher("target_modules")
    assert matcher.fullmatch(pattern, text) == (re.fullmatch(pattern, text) is not None)
    assert matcher.match(pattern, text) == (re.match(pattern, text) is not None)
    ending = re.match(rf"(.*\.)?({pattern})$", text)
    assert matcher.ends_with(pattern, text) == (ending is not None)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(.*)*x", "(a?){30}a{30}"])
def test_patterns_that_explode_in_re_are_cheap(pattern: str) -> None:
    assert not PatternMatcher("target_modules").fullmatch(pattern, "a" * 29 + ".")


def test_one_budget_for_all_patterns() -> None:
    matcher = PatternMatcher("rank_pattern")
    with pytest.raises(AdapterRejected, match="pattern_too_complex"):
        for _ in range(100_000):
            matcher.fullmatch(".*.*.*x", "model.layers.0.self_attn.q_proj")


def test_json_keeps_its_objects() -> None:
    assert decode_object(b'{"a": {"b": [1, 2.5, null]}}', "code", "field") == {
        "a": {"b": [1, 2.5, None]}
    }
