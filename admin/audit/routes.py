"""Routes of the audit log: list and verify. No route writes it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from litestar import Controller, get
from litestar.params import FromQuery, QueryParameter
from litestar.response import Stream

from admin.audit import audit
from admin.audit.audit import AuditView, VerificationView
from admin.http.entities import page
from admin.http.guards import ADMIN, requires
from admin.http.parameters import Limit, TenantName
from admin.http.request import AdminRequest
from admin.schemas import Page

MAX_SEQ = (1 << 63) - 1
ROWS_AT_ONCE = 500
"""Number of entries of an export that are read, and held in memory, at a time."""


class AuditController(Controller):
    path = "/audit"
    tags = ("audit",)
    guards = (requires(ADMIN),)

    @get()
    async def list_entries(
        self,
        request: AdminRequest,
        tenant: TenantName = None,
        object: FromQuery[str | None] = None,
        after: Annotated[int | None, QueryParameter(ge=1, le=MAX_SEQ)] = None,
        limit: Limit = 100,
    ) -> Page[AuditView]:
        """Lists entries, the newest first. `tenant` is the id of a tenant, which may be deleted.
        `after` is the `seq` of an entry."""
        async with request.reading() as connection:
            found = await audit.list_entries(
                connection, tenant_id=tenant, object=object, before=after, limit=limit + 1
            )
        return page(found, limit)

    @get("/export", media_type="application/x-ndjson")
    async def export(
        self,
        request: AdminRequest,
        tenant: TenantName = None,
        after: Annotated[int, QueryParameter(ge=0, le=MAX_SEQ)] = 0,
    ) -> Stream:
        """Streams the entries after the entry `after`, oldest first, as lines of JSON. An export
        that breaks goes on with `after` set to the `seq` of the last whole line. `tenant` is the id
        of a tenant, which may be deleted."""

        async def lines() -> AsyncIterator[bytes]:
            last = after
            while True:
                async with request.reading() as connection:
                    found = await audit.export_entries(connection, tenant, last, ROWS_AT_ONCE)
                if not found:
                    return
                yield b"".join(msgspec.json.encode(entry) + b"\n" for entry in found)
                last = found[-1].seq

        return Stream(lines(), media_type="application/x-ndjson")

    @get("/verify")
    async def verify(
        self,
        request: AdminRequest,
        after: Annotated[int, QueryParameter(ge=0, le=MAX_SEQ)] = 0,
        limit: Annotated[int, QueryParameter(ge=1, le=10_000)] = 2_000,
    ) -> VerificationView:
        """Recomputes the hashes of a part of the chain."""
        async with request.reading() as connection:
            return await audit.verify(connection, request.plane.config.pepper, after, limit)
