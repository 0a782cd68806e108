"""Errors as answers: which failure an exception is, its body in OpenAI's form, and its headers."""

from __future__ import annotations

import logging
import math
from typing import Any

from litestar.exceptions import HTTPException, ValidationException

from store.errors import INVALID, ApiError
from web.errors import InternalError

log = logging.getLogger(__name__)

REFUSAL = "refusal"
"""Key in a request's state of the code of the error that is answered, for logs and counters."""

CODES = {404: "route_not_found", 405: "method_not_allowed", 413: "request_too_large"}
"""Codes of the framework's refusals."""
HEADER_NAMES = {"if_match": "If-Match", "idempotency_key": "Idempotency-Key"}
"""Names of headers, by the names that the framework uses."""


class FrameworkRefusal(ApiError):
    """Refusal of the framework, such as an unknown route or an invalid parameter."""

    def __init__(self, error: HTTPException) -> None:
        message, param = error.detail, None
        if isinstance(error, ValidationException):
            message, param = _explain(error)
        super().__init__(message, CODES.get(error.status_code, "invalid"), param)
        self.status = error.status_code
        self.type = "not_found_error" if error.status_code == 404 else INVALID
        self.headers = dict(error.headers or {})


def find_api_error(error: Exception) -> ApiError | None:
    """Returns the failure that an exception is, or None if it is unforeseen."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException) and error.status_code < 500:
        return FrameworkRefusal(error)
    return None


def to_api_error(error: Exception) -> ApiError:
    """Returns the failure that an exception is. Logs those that reveal nothing to clients."""
    found = find_api_error(error) or InternalError(str(error))
    if found.status == 500 and found.public_message is not None:
        log.error("unexpected failure", exc_info=error)
    return found


def error_body(error: ApiError) -> dict[str, Any]:
    """Returns the error's body in OpenAI's form, `{"error": {message, type, param, code}}`."""
    about = {
        "message": error.public_message or error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    return {"error": {**error.details, **about}}


def error_headers(error: ApiError) -> dict[str, str]:
    """Returns the headers of an error's answer, such as those by which official clients decide
    whether and when to retry."""
    headers: dict[str, str] = {}
    if isinstance(error, FrameworkRefusal):
        headers |= error.headers
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if (seconds := error.retry_after_s) is not None:
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
        headers["retry-after-ms"] = str(max(1, math.ceil(seconds * 1000)))
    if error.should_retry is not None:
        headers["x-should-retry"] = str(error.should_retry).lower()
    return headers


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
