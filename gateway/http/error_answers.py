"""Errors as complete answers, in the form of the dialect to which the path belongs."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import NotFoundException
from litestar.types import Receive, Scope, Send

from gateway.dialects.messages_errors import OVERLOADED, messages_error
from gateway.exceptions import to_failure
from gateway.http.guards import CLOSES
from gateway.http.paths import is_of_messages
from gateway.http.request import IS_OURS, number_request
from web.error_answers import REFUSAL, error_body, error_headers
from web.meant_path import find_meant_path

MAX_SHOWN = 100
"""Maximum characters of an unknown path that are repeated in the answer."""


class ErrorAnswer:
    """ASGI application that answers with an error."""

    def __init__(self, error: Exception, scope: Scope) -> None:
        """Stores the error's code in the scope for the log and the counters of refusals, and
        whether the server caused it for the limits."""
        number_request(scope)
        failure = to_failure(error)
        self.status = failure.status
        if is_of_messages(scope["path"]):
            self.status = OVERLOADED if self.status == 503 else self.status
            self.body = messages_error(failure, scope["state"]["request_id"])
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


def to_response(request: Request[Any, Any, Any], error: Exception) -> Response[dict[str, Any]]:
    """Returns the response to an error of a handler or the router."""
    if isinstance(error, NotFoundException):
        error = NotFoundException(_no_route(request))
    answer = ErrorAnswer(error, request.scope)
    return Response(
        answer.body,
        status_code=answer.status,
        headers=answer.headers,
        media_type="application/json",
    )


def _no_route(request: Request[Any, Any, Any]) -> str:
    path = request.scope["path"]
    message = f"There is no route {request.method} {path[:MAX_SHOWN]}."
    meant = find_meant_path(path, {route.path for route in request.app.routes})
    if meant is None:
        return message + " GET /docs lists the routes."
    return message + f" Did you mean {meant}? Check the client's base URL."
