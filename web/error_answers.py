"""HTTP answers for errors, in OpenAI's format, or in Anthropic's format on Anthropic's routes."""

from __future__ import annotations

import logging
import math
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.types import Receive, Scope, Send

from store.errors import INVALID, ApiError
from web.errors import InternalError
from web.messages_errors import OVERLOADED, messages_error
from web.request_head import IS_OURS, is_of_messages, number_request

log = logging.getLogger(__name__)

REFUSAL = "refusal"
"""Key in a request's state for the code of the error that is answered. Logs and counters use it."""
CLOSES = "closes"
"""Key in a request's state for a flag: whether its connection is closed after the answer."""

CODES = {404: "route_not_found", 405: "method_not_allowed", 413: "request_too_large"}
"""Error code of each status with which the framework refuses requests."""
HEADER_NAMES = {"if_match": "If-Match", "idempotency_key": "Idempotency-Key"}
"""Header names by the parameter names that the framework uses for them."""


class FrameworkRefusal(ApiError):
    """Refusal by the framework, for example of an unknown route or an invalid parameter."""

    def __init__(self, error: HTTPException) -> None:
        message, param = error.detail, None
        if isinstance(error, ValidationException):
            message, param = _explain(error)
        super().__init__(message, CODES.get(error.status_code, "invalid"), param)
        self.status = error.status_code
        self.type = "not_found_error" if error.status_code == 404 else INVALID
        self.headers = dict(error.headers or {})


def to_api_error(error: Exception) -> ApiError:
    """Converts an exception to an error with an HTTP answer, by default an `InternalError`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException) and error.status_code < 500:
        return FrameworkRefusal(error)
    return InternalError(str(error))


def to_logged_error(error: Exception) -> ApiError:
    """Returns the result of `to_api_error`. Logs exceptions whose cause is hidden from clients."""
    found = to_api_error(error)
    if found.status == 500 and found.public_message is not None:
        log.error("unexpected failure", exc_info=error)
    return found


def error_body(error: ApiError) -> dict[str, Any]:
    """Returns the error's body in OpenAI's format, `{"error": {message, type, param, code}}`."""
    about = {
        "message": error.public_message or error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    return {"error": {**error.details, **about}}


def error_headers(error: ApiError) -> dict[str, str]:
    """Returns the HTTP headers for an error, such as `retry-after`. Official clients use some of
    them to decide whether and when to retry."""
    headers = dict(error.headers)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if (seconds := error.retry_after_s) is not None:
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
        headers["retry-after-ms"] = str(max(1, math.ceil(seconds * 1000)))
    if error.should_retry is not None:
        headers["x-should-retry"] = str(error.should_retry).lower()
    return headers


class ErrorAnswer:
    """ASGI application that answers with an error."""

    def __init__(self, error: Exception, scope: Scope) -> None:
        """Stores two values in the scope: the error's code, for the log and the counters of
        refusals, and whether the server caused the error, for the rate limits."""
        number_request(scope)
        failure = to_logged_error(error)
        self.status = failure.status
        if is_of_messages(scope["path"]):
            self.status = OVERLOADED if self.status == 503 else self.status
            self.body: Any = messages_error(failure, scope["state"]["request_id"])
        else:
            self.body = error_body(failure)
        self.headers = error_headers(failure)
        if CLOSES in scope["state"]:
            self.headers["connection"] = "close"
        scope["state"][REFUSAL] = failure.code
        scope["state"][IS_OURS] = failure.is_ours

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        body = msgspec.json.encode(self.body)
        headers = [
            *(
                (name.encode("latin-1"), text.encode("latin-1"))
                for name, text in self.headers.items()
            ),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def to_response(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """Returns the framework's response to an error of a handler or the router."""
    answer = ErrorAnswer(error, request.scope)
    return Response(
        answer.body,
        status_code=answer.status,
        headers=answer.headers,
        media_type="application/json",
    )


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
