"""Routes of the audit log: list and verify. No route writes it."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, get
from litestar.params import FromQuery, QueryParameter

from admin.audit import audit
from admin.audit.audit import AuditView, VerificationView
from admin.http.entities import page
from admin.http.guards import ADMIN, requires
from admin.http.parameters import Limit, TenantName
from admin.http.request import AdminRequest
from admin.schemas import Page

MAX_SEQ = (1 << 63) - 1


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
