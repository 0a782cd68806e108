"""Answers errors of handlers and the router. For an unknown path, suggests a similar route."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response
from litestar.exceptions import NotFoundException

from gateway.exceptions import of_worker
from web import error_answers
from web.meant_path import find_meant_path

MAX_SHOWN = 100
"""Maximum characters of an unknown path that are repeated in the answer."""


def to_response(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """Returns the response to an error of a handler or the router."""
    if isinstance(error, NotFoundException):
        error = NotFoundException(_no_route(request))
    return error_answers.to_response(request, of_worker(error))


def _no_route(request: Request[Any, Any, Any]) -> str:
    path = request.scope["path"]
    message = f"There is no route {request.method} {path[:MAX_SHOWN]}."
    meant = find_meant_path(path, {route.path for route in request.app.routes})
    if meant is None:
        return message + " GET /docs lists the routes."
    return message + f" Did you mean {meant}? Check the client's base URL."
