"""Budget of answers that wait for their clients."""

from __future__ import annotations

import pytest

from web.errors import Overloaded
from web.held_bytes import ANSWERS_TENANT_PART, AnswerBudget, BodyBudget, HeldAnswer, HeldBody


def answer_of(owner: str, budget: AnswerBudget, num_bytes: int = 1 << 20) -> HeldAnswer:
    """The answer to a request with this many bytes."""
    body = HeldBody(BodyBudget())
    body.charge(owner)
    body.add(num_bytes)
    return HeldAnswer(budget, body)


def test_a_refusal_because_of_other_tenants_ends_with_their_answers() -> None:
    budget = AnswerBudget(ANSWERS_TENANT_PART * 100)
    others = [answer_of(f"other{number}", budget) for number in range(ANSWERS_TENANT_PART)]
    for each in others:
        each.reserve(100)
    with pytest.raises(Overloaded, match="All answers"):
        answer_of("own", budget).reserve(50)
    for each in others:
        each.end()
    again = answer_of("own", budget)
    again.refuse_if_full()
    again.reserve(50)


def test_a_refusal_because_of_own_answers_ends_with_the_first_of_them() -> None:
    budget = AnswerBudget(ANSWERS_TENANT_PART * 100)
    held = answer_of("own", budget)
    held.reserve(80)
    with pytest.raises(Overloaded, match="This tenant's"):
        answer_of("own", budget).reserve(50)
    with pytest.raises(Overloaded, match="This tenant's"):
        answer_of("own", budget).refuse_if_full()
    held.end()
    answer_of("own", budget).refuse_if_full()


def test_a_small_request_is_refused_for_its_own_answer_only() -> None:
    budget = AnswerBudget(ANSWERS_TENANT_PART * 100)
    answer_of("own", budget).reserve(80)
    with pytest.raises(Overloaded, match="This tenant's"):
        answer_of("own", budget, 100).reserve(50)
    small = answer_of("own", budget, 200)
    small.refuse_if_full()
    small.reserve(5)
    with pytest.raises(Overloaded, match="This tenant's"):
        answer_of("own", budget, 200_000).refuse_if_full()
