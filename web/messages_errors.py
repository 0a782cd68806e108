"""Errors in the format of Anthropic's API."""

from __future__ import annotations

from typing import Any

from store.errors import ApiError

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
"""Type of an error by its status. An error with another status is an invalid request."""
OVERLOADED = 529
"""Status that replaces 503, which the other APIs use."""


def messages_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns the error's body, `{"type": "error", "error": {type, message, details},
    "request_id"}`."""
    return {
        "type": "error",
        "error": {
            "type": TYPES.get(error.status, TYPES[400]),
            "message": error.public_message or error.message,
            "details": {"error_code": error.code, "param": error.param},
        },
        "request_id": request_id,
    }
