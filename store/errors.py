"""Base class of errors that have an HTTP answer, and the errors of the database and its records.
The remaining errors are in `web.errors`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

INVALID = "invalid_request_error"
SERVER = "server_error"
FAILED = "The server had an error while processing your request."


class ApiError(Exception):
    """Error with an HTTP answer. The class defines the answer's status, type and code."""

    status: int = 500
    type: str = SERVER
    code: str | None = "internal_error"
    """Code of the error for programs. A single error may override the class's code."""
    retry_after_s: float | None = None
    """Seconds after which clients are told to retry. None if waiting does not help."""
    should_retry: bool | None = None
    """Value of the header `x-should-retry`, by which official clients decide whether to retry. None
    lets them decide by the status."""
    is_ours: ClassVar[bool] = False
    """Whether the server caused the failure. If so, the request's rate limit is credited."""
    headers: Mapping[str, str] = {}
    """Further headers of the answer."""
    public_message: ClassVar[str | None] = None
    """Text that clients get instead of the message, because the message may name hosts or accounts.
    None sends the message."""

    def __init__(
        self,
        message: str,
        code: str | None = None,
        param: str | None = None,
        details: Mapping[str, Any] | None = None,
        *,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        """`param` names the wrong field, parameter or header. `details` are additional fields of
        the answer. The other arguments replace the class's values unless they are None."""
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.param = param
        self.details = details or {}
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s
        if should_retry is not None:
            self.should_retry = should_retry


class Invalid(ApiError):
    """Error for input that breaks a rule."""

    status = 400
    type = INVALID
    code = "invalid"


class NotFound(ApiError):
    """Error for an object that does not exist, or that the caller may not see."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class Conflict(ApiError):
    """Error for a change that the current state forbids."""

    status = 409
    type = INVALID
    code = "conflict"
    should_retry = False


class AlreadyExists(Conflict):
    """Error for a name that is already in use."""

    code = "already_exists"


class Overtaken(Conflict):
    """Error for a change that a concurrent change prevented. A retry may succeed."""

    should_retry = True

    def __init__(self) -> None:
        super().__init__("another change came in between; try again")


class DatabaseUnavailable(ApiError):
    """Error for a database that cannot be reached, is starting, or did not answer in time."""

    status = 503
    code = "database_unavailable"
    retry_after_s = 1
    public_message = "The database does not answer."


class DatabaseMisconfigured(DatabaseUnavailable):
    """Error for a database that refuses the connection until a setting is changed."""


class DatabaseRefused(ApiError):
    """Error for a statement that Postgres refused although no client made a mistake."""

    public_message = FAILED


class MigrationError(ApiError):
    """Error for a schema that differs from the migration files."""

    code = "migration"
    public_message = FAILED
