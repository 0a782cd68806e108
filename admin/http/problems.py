"""Maps failures to HTTP answers, with bodies in OpenAI's form."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException

from adapters.errors import AdapterRejected
from adapters.store.folder import StoreUnavailable, is_disk_full, is_read_only
from store import errors

log = logging.getLogger(__name__)


INVALID = "invalid_request_error"
AWAY = "The database does not answer."

PROBLEMS: dict[type[errors.AdminError], tuple[int, str]] = {
    errors.Invalid: (400, INVALID),
    errors.Unauthenticated: (401, "authentication_error"),
    errors.Forbidden: (403, "permission_error"),
    errors.NotFound: (404, "not_found_error"),
    errors.AlreadyExists: (409, INVALID),
    errors.Conflict: (409, INVALID),
    errors.IdempotencyKeyReused: (422, INVALID),
    errors.PreconditionFailed: (412, INVALID),
    errors.Stalled: (408, INVALID),
    errors.TooLarge: (413, INVALID),
    errors.TooMany: (429, "rate_limit_error"),
    errors.Overloaded: (503, "server_error"),
}
CODES = {404: "route_not_found", 405: "method_not_allowed", 413: "request_too_large"}
"""Codes of the framework's refusals."""
HEADER_NAMES = {"if_match": "If-Match", "idempotency_key": "Idempotency-Key"}
"""Names of headers, by the names that the framework uses."""
SOON = {"retry-after": "1", "retry-after-ms": "1000"}
HEADERS = {
    401: {"www-authenticate": "Bearer"},
    # Otherwise the official clients would retry requests that cannot succeed.
    409: {"x-should-retry": "false"},
    412: {"x-should-retry": "false"},
    422: {"x-should-retry": "false"},
    429: SOON,
    503: SOON,
}


def to_response(request: Request[Any, Any, Any], error: Exception) -> Response[dict[str, Any]]:
    """Returns the answer to an error of a handler. Unknown errors reveal nothing."""
    answer = _to_response(error)
    # Used by the log and the counters of refusals (gateway/http/refusals.py).
    request.scope["state"]["refusal"] = answer.content["error"]["code"]
    return answer


def _to_response(error: Exception) -> Response[dict[str, Any]]:
    match error:
        case AdapterRejected():
            return _answer(400, INVALID, str(error), error.field, error.code, error.to_dict())
        case errors.DatabaseUnavailable():
            # The driver's message may name hosts and accounts.
            return _answer(503, "server_error", AWAY, None, error.code)
        case errors.Overtaken():
            answer = _answer(409, INVALID, str(error), None, error.code)
            answer.headers["x-should-retry"] = "true"
            return answer
        case errors.RateExceeded():
            answer = _answer(429, "rate_limit_error", str(error), None, error.code)
            answer.headers["retry-after"] = str(math.ceil(error.retry_after_s))
            answer.headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
            return answer
        case errors.AdminError() if type(error) in PROBLEMS:
            place = error.param, error.code, error.details
            return _answer(*PROBLEMS[type(error)], str(error), *place)
        case OSError() if is_disk_full(error):
            log.error("the disk is full: %s", error)
            message = f"The server's disk is full: {error.strerror}."
            return _answer(507, "server_error", message, None, "disk_full")
        case OSError() if is_read_only(error):
            log.error("the store cannot be written: %s", error)
            message = f"The server's store cannot be written: {error.strerror}."
            answer = _answer(503, "server_error", message, None, "store_read_only")
            answer.headers["x-should-retry"] = "false"
            return answer
        case StoreUnavailable():
            log.error("%s", error)
            message = "The server's store does not answer."
            return _answer(503, "server_error", message, None, "store_unavailable")
        case ValidationException():
            message, param = _explain(error)
            return _answer(400, INVALID, message, param, "invalid")
        case HTTPException() if error.status_code < 500:
            kind = "not_found_error" if error.status_code == 404 else INVALID
            code = CODES.get(error.status_code, "invalid")
            answer = _answer(error.status_code, kind, error.detail, None, code)
            answer.headers.update(error.headers or {})
            return answer
        case _:
            log.error("unexpected failure", exc_info=error)
            return _answer(500, "server_error", "The server had an error.", None, "internal_error")


def _answer(
    status: int,
    kind: str,
    message: str,
    param: str | None,
    code: str | None,
    more: Mapping[str, Any] | None = None,
) -> Response[dict[str, Any]]:
    problem = {**(more or {}), "message": message, "type": kind, "param": param, "code": code}
    return Response({"error": problem}, status_code=status, headers=HEADERS.get(status))


def _explain(error: ValidationException) -> tuple[str, str | None]:
    """Returns the framework's message, and the parameter that it is about."""
    extra: Any = error.extra
    if isinstance(extra, list) and extra:
        first: Any = extra[0]  # pyright: ignore[reportUnknownVariableType]
        if isinstance(first, dict) and "message" in first:
            name = str(first.get("key", ""))[:64]  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
            name = HEADER_NAMES.get(name, name)
            return f"{name}: {first['message']}", name or None
    return error.detail, None
