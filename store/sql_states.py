"""Table of the SQLSTATE codes of Postgres that are about the server or a concurrent change, and not
about a statement. https://www.postgresql.org/docs/current/errcodes-appendix.html"""

from __future__ import annotations

from enum import Enum


class Meaning(Enum):
    LOST = "lost"
    """The connection is of no more use, and a new one may reach another server."""
    BUSY = "busy"
    """The server cannot do the work now. The connection can be used again."""
    OVERTAKEN = "overtaken"
    """A concurrent change prevented this one. A retry may succeed."""
    MISCONFIGURED = "misconfigured"
    """The server refuses the connection until a setting is changed."""


MEANINGS = {
    "08": Meaning.LOST,  # connection_exception
    "25006": Meaning.LOST,  # read_only_sql_transaction: a standby, or a primary of earlier
    "25P03": Meaning.LOST,  # idle_in_transaction_session_timeout: the server has disconnected
    "25P04": Meaning.LOST,  # transaction_timeout: the server has disconnected
    "26000": Meaning.LOST,  # invalid_sql_statement_name: a proxy has changed the session
    "28": Meaning.MISCONFIGURED,  # invalid_authorization_specification
    "3D000": Meaning.MISCONFIGURED,  # invalid_catalog_name: no such database
    "40": Meaning.OVERTAKEN,  # transaction_rollback: deadlocks, conflicts with recovery
    "53": Meaning.BUSY,  # insufficient_resources: disk full, too many connections
    "55P03": Meaning.BUSY,  # lock_not_available
    "57": Meaning.BUSY,  # operator_intervention: the statement was cancelled
    "57P": Meaning.LOST,  # shutdown, crash, starting, database dropped, idle session
    "58": Meaning.BUSY,  # system_error: the server's disk
}
"""Meaning of codes by their first characters. The longest match applies."""


def meaning_of(state: str) -> Meaning | None:
    """Returns the meaning of a SQLSTATE code, or None if the error is about the statement."""
    return next((MEANINGS[state[:n]] for n in (5, 3, 2) if state[:n] in MEANINGS), None)
