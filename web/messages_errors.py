"""Errors in the format of Anthropic's API."""

from __future__ import annotations

from typing import Literal

import msgspec

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
"""Status of answers of this API where the other APIs answer with 503."""


class MessagesErrorDetails(msgspec.Struct, frozen=True):
    type: str
    message: str
    details: dict[str, str | None]
    """`error_code` is the code of the other dialects, and `param` names the invalid field."""


class MessagesErrorBody(msgspec.Struct, frozen=True):
    """Body of every error on this dialect's routes, in Anthropic's form."""

    type: Literal["error"]
    error: MessagesErrorDetails
    request_id: str


def messages_error(error: ApiError, request_id: str) -> MessagesErrorBody:
    """Returns the body of the answer to an error."""
    details = MessagesErrorDetails(
        type=TYPES.get(error.status, TYPES[400]),
        message=error.public_message or error.message,
        details={"error_code": error.code, "param": error.param},
    )
    return MessagesErrorBody("error", details, request_id)
