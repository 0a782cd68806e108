"""Defines routes that need no API key: liveness, readiness and version."""

from __future__ import annotations

from litestar import Response, get
from litestar.openapi import ResponseSpec

from gateway.http.request import HttpRequest
from web.guards import public
from web.openapi import refused
from web.version import this_version


@get("/livez", guards=[public])
async def livez() -> dict[str, str]:
    """Returns 200 while the process runs."""
    return {"status": "ok"}


@get(
    ["/readyz", "/health"],
    guards=[public],
    responses={
        503: ResponseSpec(
            dict[str, str], generate_examples=False, description="Not ready; `reason` says why."
        )
    },
)
async def readyz(request: HttpRequest) -> Response[dict[str, str]]:
    """Returns 200 if requests can be served: the catalog is loaded and not stale, usage can be
    recorded, a worker serves a base model unless there is none, and the server is not draining."""
    reason = request.gateway.why_not_ready()
    if reason is None:
        return Response({"status": "ok"})
    return Response({"status": "unavailable", "reason": reason}, status_code=503)


@get("/version", guards=[public], responses=refused(429, 503))
async def get_version() -> dict[str, str]:
    """Returns the package's version."""
    return {"version": this_version()}
