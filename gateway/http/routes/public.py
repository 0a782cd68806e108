"""Defines the routes that need no API key: documents, liveness, readiness and version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.http.openapi import document
from gateway.http.reference import reference
from gateway.http.reference_page import reference_page
from gateway.http.request import HttpRequest
from gateway.http.routing import Answer, Route, get
from gateway.http.welcome_page import welcome_page
from web.version import this_version

Json = Mapping[str, Any]

HTML = b"text/html; charset=utf-8"
HEADERS = [(b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'")]


class Documents:
    """Routes of the documents about routes. `beside` is the OpenAPI document of another application
    on the same port, or None."""

    def __init__(self, routes: Sequence[Route], beside: Json | None) -> None:
        self._described = routes
        self._beside = beside
        self._page = self._document = b""
        self.routes = [
            get("/docs", in_document=False)(self.show_reference),
            get("/schema", "/schema/openapi.json", in_document=False)(self.show_document),
        ]

    def write(self) -> None:
        """Writes the documents. The other application's routes are part of them."""
        written, beside = document(self._described), self._beside
        if beside is not None:
            written["paths"] |= beside["paths"]
            written["components"]["schemas"] |= beside["components"]["schemas"]
        self._document = msgspec.json.encode(written)
        page = reference_page(reference(msgspec.json.decode(self._document)), this_version())
        self._page = page.encode()

    async def show_reference(self, _request: HttpRequest) -> Answer[bytes]:
        """Returns the API reference, which loads nothing from other servers."""
        return Answer(self._page, headers=HEADERS, media_type=HTML)

    async def show_document(self, _request: HttpRequest) -> Answer[bytes]:
        """Returns the OpenAPI document."""
        return Answer(self._document)


@get("/", in_document=False)
async def welcome(_request: HttpRequest) -> Answer[bytes]:
    """Returns a page that says what this server is and links to its documentation."""
    return Answer(welcome_page(this_version()).encode(), headers=HEADERS, media_type=HTML)


@get("/livez")
async def livez(_request: HttpRequest) -> Answer[dict[str, str]]:
    """Returns 200 while the process runs."""
    return Answer({"status": "ok"})


@get("/readyz", "/health")
async def readyz(request: HttpRequest) -> Answer[dict[str, str]]:
    """Returns 200 if requests can be served: the catalog is loaded and not stale, usage can be
    recorded, a worker serves a base model unless there is none, and the server is not draining."""
    reason = request.gateway.why_not_ready()
    if reason is None:
        return Answer({"status": "ok"})
    return Answer({"status": "unavailable", "reason": reason}, 503)


@get("/version")
async def get_version(_request: HttpRequest) -> Answer[dict[str, str]]:
    """Returns the package's version."""
    return Answer({"version": this_version()})
