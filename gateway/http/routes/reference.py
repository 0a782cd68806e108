"""Defines the routes of HTML pages: the gateway's start page and the API reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from litestar import Litestar, MediaType, Response, get

from gateway.http.reference import reference
from gateway.http.reference_page import reference_page
from gateway.http.request import HttpRequest
from gateway.http.welcome_page import welcome_page
from web.guards import public
from web.version import this_version

Json = Mapping[str, Any]

PAGE = "reference_page"
"""Key of the reference page in the application's state."""
BESIDE = "document_beside"
"""Key in the application's state. The value is the OpenAPI document of another application on the
same port, or None."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
HEADERS = {"content-security-policy": POLICY}


def write_documents(app: Litestar) -> None:
    """Generates the OpenAPI document, which the framework keeps, and the reference page. Both
    contain the routes of another application on the same port."""
    plugins = cast("Any", app.plugins)
    document: Any = plugins.get("OpenAPIPlugin").provide_openapi_schema()
    beside: Json | None = app.state.get(BESIDE)
    if beside is not None:
        document["paths"] |= beside["paths"]
        document["components"]["schemas"] |= beside["components"]["schemas"]
    app.state[PAGE] = reference_page(reference(document), this_version())


@get("/docs", guards=[public], include_in_schema=False)
async def show_reference(request: HttpRequest) -> Response[str]:
    """Returns the API reference, which loads nothing from other servers."""
    return Response(request.app.state[PAGE], headers=HEADERS, media_type=MediaType.HTML)


@get("/", guards=[public], include_in_schema=False)
async def welcome() -> Response[str]:
    """Returns a page that says what this server is and links to its documentation."""
    return Response(welcome_page(this_version()), headers=HEADERS, media_type=MediaType.HTML)
