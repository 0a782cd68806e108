"""Errors in Anthropic's form."""

from __future__ import annotations

from typing import Any

from gateway.exceptions import ApiError, Problem, code_of

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Type of an error by its status. Other statuses are invalid requests."""
OVERLOADED = 529
"""Status of an answer where other dialects use 503."""


def messages_error(
    error: Exception, problem: Problem, message: str, request_id: str
) -> dict[str, Any]:
    """Returns the error's body, `{"type": "error", "error": {type, message, details},
    "request_id"}`. `problem` and `message` are those of `problem_of`."""
    param = error.param if isinstance(error, ApiError) else None
    return {
        "type": "error",
        "error": {
            "type": TYPES.get(problem.status, TYPES[400]),
            "message": message,
            "details": {"error_code": code_of(error, problem), "param": param},
        },
        "request_id": request_id,
    }
