"""Errors of the Postgres plane. HTTP answers to them are in admin/http/problems.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class AdminError(Exception):
    """Base of all; `code` names the case for machines, `details` are more for them to read."""

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
    """The input breaks a rule."""

    code = "invalid"


class NotFound(AdminError):
    """No such thing, or not for this caller."""

    code = "not_found"


class AlreadyExists(AdminError):
    """The name is taken."""

    code = "already_exists"


class Conflict(AdminError):
    """The present state forbids it."""

    code = "conflict"


class Overtaken(Conflict):
    """Another change came in between: the same again may succeed."""

    def __init__(self) -> None:
        super().__init__("another change came in between; try again")


class IdempotencyKeyReused(AdminError):
    """The caller gave the same Idempotency-Key to another request."""

    code = "idempotency_key_reused"


class PreconditionFailed(AdminError):
    """It has changed since the caller looked."""

    code = "precondition_failed"


class DatabaseUnavailable(AdminError):
    """Postgres cannot be reached, is starting, or did not answer in time."""

    code = "database_unavailable"


class DatabaseMisconfigured(DatabaseUnavailable):
    """Postgres is there and does not take us: it helps to change a setting, not to wait."""


class MigrationError(AdminError):
    """The schema is not what the migration files say."""

    code = "migration"


class Unauthenticated(AdminError):
    """No API key, or none that is valid."""

    code = "invalid_api_key"


class Forbidden(AdminError):
    """The key is valid and may not do this."""

    code = "insufficient_scope"


class TooLarge(AdminError):
    """More bytes than allowed."""

    code = "request_too_large"


class TooMany(AdminError):
    """The caller has as many under way as it may."""

    code = "too_many"


class RateExceeded(AdminError):
    """The tenant calls more often than it may."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(AdminError):
    """Too much is under way, of whomever."""

    code = "overloaded"


class Stalled(AdminError):
    """The rest of the request does not come."""

    code = "request_timeout"
