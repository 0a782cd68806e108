"""Errors of the admin plane. admin/http/problems.py maps them to HTTP answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class AdminError(Exception):
    """Base of these errors. `code` names the case, `details` has further fields, for programs."""

    code = "internal"

    def __init__(
        self,
        message: str,
        code: str | None = None,
        param: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.param = param
        self.details = details or {}


class Invalid(AdminError):
    """Input that breaks a rule."""

    code = "invalid"


class NotFound(AdminError):
    """Object that does not exist, or that the caller may not see."""

    code = "not_found"


class AlreadyExists(AdminError):
    """Name that is already in use."""

    code = "already_exists"


class Conflict(AdminError):
    """Change that the current state forbids."""

    code = "conflict"


class Overtaken(Conflict):
    """Change that another change preceded. A retry may succeed."""

    def __init__(self) -> None:
        super().__init__("another change came in between; try again")


class IdempotencyKeyReused(AdminError):
    """Idempotency-Key that the caller has used for another request."""

    code = "idempotency_key_reused"


class PreconditionFailed(AdminError):
    """Object that has changed since the caller read it."""

    code = "precondition_failed"


class DatabaseUnavailable(AdminError):
    """Postgres that cannot be reached, is starting, or did not answer in time."""

    code = "database_unavailable"


class DatabaseMisconfigured(DatabaseUnavailable):
    """Postgres that refuses the connection. A setting must be changed, waiting does not help."""


class MigrationError(AdminError):
    """Schema that differs from the migration files."""

    code = "migration"


class Unauthenticated(AdminError):
    """Missing or invalid API key."""

    code = "invalid_api_key"


class Forbidden(AdminError):
    """Valid key without the necessary rights."""

    code = "insufficient_scope"


class TooLarge(AdminError):
    """More bytes than allowed."""

    code = "request_too_large"


class TooMany(AdminError):
    """Too many operations of the caller in progress."""

    code = "too_many"


class RateExceeded(AdminError):
    """Call of a tenant above its rate limit."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(AdminError):
    """Too many operations in progress in all."""

    code = "overloaded"


class Stalled(AdminError):
    """Request whose remaining bytes do not arrive."""

    code = "request_timeout"
