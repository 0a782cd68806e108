"""Pages for people: the gateway's address, and the reference of its routes."""

from __future__ import annotations

from typing import Any, cast

from litestar import Litestar, MediaType, Response, get

from gateway.http.guards import public
from gateway.http.reference import Json, reference
from gateway.http.reference_page import POLICY, reference_page
from gateway.http.request import GatewayRequest
from gateway.http.routes.health import this_version
from gateway.http.welcome_page import welcome_page

PAGE = "reference_page"
"""Key of the application's state."""
HEADERS = {"content-security-policy": POLICY}


def write_documents(app: Litestar) -> None:
    """Makes the OpenAPI document, which the framework keeps, and the page of it."""
    plugins = cast("Any", app.plugins)
    document: Json = plugins.get("OpenAPIPlugin").provide_openapi_schema()
    app.state[PAGE] = reference_page(reference(document), this_version())


@get("/docs", guards=[public], include_in_schema=False)
async def show_reference(request: GatewayRequest) -> Response[str]:
    """Needs nothing from elsewhere."""
    return Response(request.app.state[PAGE], headers=HEADERS, media_type=MediaType.HTML)


@get("/", guards=[public], include_in_schema=False)
async def welcome() -> Response[str]:
    """Tells a browser what this server is, and where to read on."""
    return Response(welcome_page(this_version()), headers=HEADERS, media_type=MediaType.HTML)
