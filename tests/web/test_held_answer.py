"""Budget of answers that wait for their clients."""

from __future__ import annotations

import pytest

from web.body_budget import BodyBudget, HeldBody
from web.errors import Overloaded
from web.held_answer import TENANT_PART, AnswerBudget, HeldAnswer


def answer_of(owner: str, budget: AnswerBudget) -> HeldAnswer:
    body = HeldBody(BodyBudget())
    body.charge(owner)
    body.add(10)
    return HeldAnswer(budget, body)


def test_a_refusal_because_of_other_tenants_ends_with_their_answers() -> None:
    budget = AnswerBudget(TENANT_PART * 100)
    others = [answer_of(f"other{number}", budget) for number in range(TENANT_PART)]
    for each in others:
        each.reserve(100)
    with pytest.raises(Overloaded, match="Too many bytes of answers"):
        answer_of("own", budget).reserve(50)
    for each in others:
        each.end()
    again = answer_of("own", budget)
    again.refuse_if_full()
    again.reserve(50)


def test_a_refusal_because_of_own_answers_ends_with_the_first_of_them() -> None:
    budget = AnswerBudget(TENANT_PART * 100)
    held = answer_of("own", budget)
    held.reserve(80)
    with pytest.raises(Overloaded, match="this tenant's"):
        answer_of("own", budget).reserve(50)
    with pytest.raises(Overloaded, match="this tenant's"):
        answer_of("own", budget).refuse_if_full()
    held.end()
    answer_of("own", budget).refuse_if_full()
