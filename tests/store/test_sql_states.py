"""Every SQLSTATE that the driver knows has one place, and those of a lost server are lost."""

from __future__ import annotations

import asyncpg
import pytest

from store import database
from store.errors import ApiError, DatabaseMisconfigured, DatabaseUnavailable, Overtaken
from store.sql_states import MEANINGS, Meaning, meaning_of

LOST = {
    *("08000", "08003", "08006", "08001", "08004", "08007", "08P01"),
    *("25006", "25P03", "25P04", "26000", "57P01", "57P02", "57P03", "57P04", "57P05"),
}
BUSY = {"53000", "53100", "53200", "53300", "53400", "55P03", "57000", "57014", "58030"}
OVERTAKEN = {"40000", "40001", "40002", "40003", "40P01"}
MISCONFIGURED = {"28000", "28P01", "3D000"}
OTHERS = {"22003", "23505", "0A000", "25001", "25P02", "42601", "42501", "55000", "XX000", "P0001"}


@pytest.mark.parametrize(
    ("states", "meaning", "error"),
    [
        (LOST, Meaning.LOST, DatabaseUnavailable),
        (BUSY, Meaning.BUSY, DatabaseUnavailable),
        (OVERTAKEN, Meaning.OVERTAKEN, Overtaken),
        (MISCONFIGURED, Meaning.MISCONFIGURED, DatabaseMisconfigured),
        (OTHERS, None, ApiError),
    ],
)
def test_codes_have_their_meaning(
    states: set[str], meaning: Meaning | None, error: type[ApiError]
) -> None:
    for state in states:
        assert meaning_of(state) is meaning, state
        raised = asyncpg.PostgresError.new({"C": state, "M": "told by the server"})
        assert isinstance(database._translate(raised), error), state


def test_each_entry_of_the_table_is_a_code_or_a_class_of_the_driver() -> None:
    known = {str(getattr(each, "sqlstate", None)) for each in vars(asyncpg).values()}
    # Newer than the driver's list.
    known.add("25P04")
    for prefix in MEANINGS:
        assert any(state.startswith(prefix) for state in known), prefix
