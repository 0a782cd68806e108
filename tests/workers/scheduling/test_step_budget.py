"""How many rows of prompts a step takes, where a row takes a millisecond and a step ten more."""

from __future__ import annotations

import math

import pytest

from workers.scheduling.step_budget import MIN_ROWS, StepBudget
from workers.scheduling.step_cost import StepTime


def budget(
    *, num_decoding: int, seconds: float, num_rows: int = 512, num_of_guests: int = 0
) -> StepBudget:
    learned = StepTime()
    for rows in range(10, 200, 10):
        learned.note(rows, rows, 0.01 + 0.001 * rows)
    return StepBudget(
        learned,
        num_rows=num_rows,
        decode_s=learned.predict(num_decoding, 0),
        without_guests_s=(
            learned.predict(num_decoding - num_of_guests, 0) if num_decoding else math.inf
        ),
        seconds=seconds,
    )


def test_prompts_get_the_time_that_is_left() -> None:
    step = budget(num_decoding=10, seconds=0.22)
    assert step.room(0, is_guest=False) == pytest.approx(200, abs=1)
    step.take(150, 0)
    assert step.room(0, is_guest=False) == pytest.approx(50, abs=1)
    assert not step.is_spent(is_guest=False)
    step.take(51, 0)
    assert step.is_spent(is_guest=False)


def test_prompts_get_some_rows_whoever_is_late() -> None:
    step = budget(num_decoding=10, seconds=0.0)
    assert step.room(0, is_guest=True) == step.room(0, is_guest=False) == MIN_ROWS
    step.take(MIN_ROWS - 1, 0)
    assert step.room(0, is_guest=False) == 1 and not step.is_spent(is_guest=True)
    step.take(1, 0)
    assert step.is_spent(is_guest=False) and step.num_rows == 0


def test_no_more_rows_than_a_step_has() -> None:
    step = budget(num_decoding=10, seconds=math.inf, num_rows=100)
    assert step.room(0, is_guest=False) == 100
    step.take(70, 0)
    assert step.room(0, is_guest=False) == 30


def test_guests_add_two_fifths_of_what_a_step_takes_without_them() -> None:
    step = budget(num_decoding=190, seconds=0.5)
    assert step.room(0, is_guest=True) == pytest.approx(80, abs=1)
    assert step.room(0, is_guest=False) == pytest.approx(300, abs=1)
    step.take(20, 0)
    assert step.room(0, is_guest=True) == pytest.approx(60, abs=1)
    step.take(81, 0)
    assert step.is_spent(is_guest=True) and not step.is_spent(is_guest=False)
    assert step.room(0, is_guest=False) == pytest.approx(199, abs=2)


def test_rows_of_guests_that_generate_are_in_their_part() -> None:
    """190 rows take 0.2 s; without 10 of guests 0.19, and with two fifths of it more 0.266."""
    step = budget(num_decoding=190, seconds=0.5, num_of_guests=10)
    assert step.room(0, is_guest=True) == pytest.approx(66, abs=1)
    assert step.room(0, is_guest=False) == pytest.approx(300, abs=1)
    full = budget(num_decoding=190, seconds=0.5, num_of_guests=190)
    assert full.room(0, is_guest=True) == MIN_ROWS
    full.take(MIN_ROWS, 0)
    assert full.is_spent(is_guest=True) and not full.is_spent(is_guest=False)


def test_guests_are_bounded_by_what_is_late_too() -> None:
    step = budget(num_decoding=190, seconds=0.27)
    assert step.room(0, is_guest=True) == pytest.approx(70, abs=1)


def test_where_nobody_generates_guests_are_as_others() -> None:
    step = budget(num_decoding=0, seconds=math.inf)
    assert step.room(0, is_guest=True) == 512
