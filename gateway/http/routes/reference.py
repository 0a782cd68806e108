"""The reference of this gateway's routes, for people."""

from __future__ import annotations

from typing import Any, cast

from litestar import Litestar, MediaType, Response, get

from gateway.http.guards import public
from gateway.http.reference import Json, reference
from gateway.http.reference_page import POLICY, reference_page
from gateway.http.request import GatewayRequest
from gateway.http.routes.health import this_version

PAGE = "reference_page"
"""Key of the application's state."""


def write_documents(app: Litestar) -> None:
    """Makes the OpenAPI document, which the framework keeps, and the page of it."""
    plugins = cast("Any", app.plugins)
    document: Json = plugins.get("OpenAPIPlugin").provide_openapi_schema()
    app.state[PAGE] = reference_page(reference(document), this_version())


@get("/docs", guards=[public], include_in_schema=False)
async def show_reference(request: GatewayRequest) -> Response[str]:
    """Needs nothing from elsewhere."""
    headers = {"content-security-policy": POLICY}
    return Response(request.app.state[PAGE], headers=headers, media_type=MediaType.HTML)
