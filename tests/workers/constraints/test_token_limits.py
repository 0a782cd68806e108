"""Which tokens may follow, by the rules of a request alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.constraints.token_limits import MAX_BEFORE_THOUGHT, TokenLimits
from workers.scheduling.constraint import effective_bans
from workers.wire.protocol import ThoughtBound, TokenRules

VOCAB = 77
BEGIN, END = 70, 71


def allowed_by(limits: TokenLimits) -> set[int] | None:
    if limits.mask is None:
        return None
    return {t for t in range(VOCAB) if limits.mask[t // 32] >> t % 32 & 1}


@given(st.sets(st.integers(0, VOCAB - 1), min_size=1))
def test_allowed_tokens_are_a_mask_of_the_vocabulary(allowed: set[int]) -> None:
    limits = TokenLimits(TokenRules(allowed=tuple(allowed)), VOCAB, [])
    assert allowed_by(limits) == allowed and not limits.needs_host_token
    assert limits.mask is not None and limits.mask.dtype == np.int32 and len(limits.mask) == 3


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6),
    st.lists(st.integers(0, 3), max_size=12),
    st.integers(0, 12),
)
def test_banned_is_what_would_complete_a_sequence(
    banned: list[list[int]], generated: list[int], num_resumed: int
) -> None:
    """By the definition, wherever the sequence is resumed."""
    completing = {
        token for token in range(4) for each in banned if [*generated, token][-len(each) :] == each
    }
    rules = TokenRules(banned=tuple(map(tuple, banned)))
    limits = TokenLimits(rules, VOCAB, generated[:num_resumed])
    for token in generated[num_resumed:]:
        limits.advance([token])
    assert limits.banned == completing
    assert limits.needs_host_token == any(len(each) > 1 for each in banned)


def test_what_is_banned_gives_way_where_nothing_else_may_follow() -> None:
    mask = TokenLimits(TokenRules(allowed=(5, 40)), VOCAB, []).mask
    assert effective_bans(frozenset((5, 6)), mask) == {5, 6}
    assert effective_bans(frozenset((5, 40)), mask) == frozenset()
    assert effective_bans(frozenset((5, 40)), None) == {5, 40}


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_a_thought_ends_when_it_is_as_long_as_it_may_be(max_tokens: int, is_begun: bool) -> None:
    """Wherever the sequence is resumed."""
    bound = ThoughtBound(max_tokens, BEGIN, END, is_begun)
    begun = [] if is_begun else [3, BEGIN]
    thought = [random.Random(1).randrange(60) for _ in range(max_tokens)]
    whole = [*begun, *thought, END, 1, 2, BEGIN, 4]
    for num_resumed in range(len(whole) + 1):
        limits = TokenLimits(TokenRules(thought=bound), VOCAB, whole[:num_resumed])
        for number in range(num_resumed, len(whole) + 1):
            is_full = number == len(begun) + max_tokens
            assert allowed_by(limits) == ({END} if is_full else None)
            assert limits.needs_host_token == (number <= len(begun) + max_tokens)
            limits.advance(whole[number : number + 1])


def test_an_answer_that_begins_without_a_thought_has_none() -> None:
    limits = TokenLimits(TokenRules(thought=ThoughtBound(0, BEGIN, END)), VOCAB, [])
    limits.advance([1] * (MAX_BEFORE_THOUGHT - 1))
    assert limits.needs_host_token
    limits.advance([1, BEGIN])
    assert allowed_by(limits) is None and not limits.needs_host_token


def test_a_thought_that_ends_by_itself_is_not_ended_again() -> None:
    limits = TokenLimits(TokenRules(thought=ThoughtBound(3, BEGIN, END, is_begun=True)), VOCAB, [])
    limits.advance([1, END, 2, 3, 4, 5])
    assert allowed_by(limits) is None
