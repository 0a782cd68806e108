"""What this plane can do, for programs: its OpenAPI document."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Controller, Response, get

from admin.http.guards import ADMIN, requires
from admin.http.openapi import make_document
from admin.http.request import AdminRequest


class SchemaController(Controller):
    path = "/schema"

    @get(guards=[requires(ADMIN)])
    async def show_schema(self, request: AdminRequest) -> Response[Any]:
        """This document."""
        return Response(await asyncio.to_thread(make_document, request.app))
