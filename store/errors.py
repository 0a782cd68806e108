"""Failures with an answer for clients, and those that the database and its records raise. The rest
of them are in `web.errors`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

INVALID = "invalid_request_error"
SERVER = "server_error"
FAILED = "The server had an error while processing your request."


class ApiError(Exception):
    """Failure with an answer. Its class has the answer's status, type and code."""

    status: int = 500
    type: str = SERVER
    code: str | None = "internal_error"
    """Name of the case for programs. May be set for one error."""
    retry_after_s: float | None = None
    """Seconds after which clients are told to retry. None if waiting does not help."""
    should_retry: bool | None = None
    """Value of the header `x-should-retry`, by which official clients decide. None leaves the
    decision to the status."""
    is_ours: ClassVar[bool] = False
    """Whether the server caused the failure, so that the request is returned to its limit."""
    public_message: ClassVar[str | None] = None
    """Text for clients, where the message may name hosts or accounts. None for the message."""

    def __init__(
        self,
        message: str,
        code: str | None = None,
        param: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """`param` is the field, parameter or header that is wrong. `details` are further fields of
        the answer."""
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.param = param
        self.details = details or {}


class Invalid(ApiError):
    """Input that breaks a rule."""

    status = 400
    type = INVALID
    code = "invalid"


class NotFound(ApiError):
    """Object that does not exist, or that the caller may not see."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class Conflict(ApiError):
    """Change that the current state forbids."""

    status = 409
    type = INVALID
    code = "conflict"
    should_retry = False


class AlreadyExists(Conflict):
    """Name that is already in use."""

    code = "already_exists"


class Overtaken(Conflict):
    """Change that another change preceded. A retry may succeed."""

    should_retry = True

    def __init__(self) -> None:
        super().__init__("another change came in between; try again")


class DatabaseUnavailable(ApiError):
    """Postgres that cannot be reached, is starting, or did not answer in time."""

    status = 503
    code = "database_unavailable"
    retry_after_s = 1
    public_message = "The database does not answer."


class DatabaseMisconfigured(DatabaseUnavailable):
    """Postgres that refuses the connection. A setting must be changed, waiting does not help."""


class DatabaseRefused(ApiError):
    """Statement that Postgres refuses for a reason that is no client's fault."""

    public_message = FAILED


class MigrationError(ApiError):
    """Schema that differs from the migration files."""

    code = "migration"
    public_message = FAILED
