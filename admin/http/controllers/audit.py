"""The audit log: read, and verify part by part. Nothing here writes it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from litestar import Controller, get
from litestar.params import FromQuery, QueryParameter

from admin.audit import audit
from admin.audit.audit import AuditEntry
from admin.http.guards import ADMIN, requires
from admin.http.parameters import Limit, TenantName
from admin.http.request import AdminRequest
from admin.schemas import Page, page

MAX_SEQ = (1 << 63) - 1


class AuditView(msgspec.Struct, frozen=True):
    seq: int
    at: datetime
    key_id: str
    """'system' where no request made the change."""
    tenant_id: str | None
    action: str
    """Such as key.revoke, version.ready, alias.auto_rollback."""
    object: str
    details: dict[str, Any]
    """What is there since, or was until then; of an update {field: [before, after]}."""
    request_id: str | None
    address: str | None
    """Of the client; null of what no request changed."""
    hash: str

    @classmethod
    def of(cls, entry: AuditEntry) -> AuditView:
        return cls(
            seq=entry.seq,
            at=entry.at,
            key_id=entry.key_id,
            tenant_id=entry.tenant_id,
            action=entry.action,
            object=entry.object,
            details=entry.details,
            request_id=entry.request_id,
            address=entry.address,
            hash=entry.hash.hex(),
        )


class VerificationView(msgspec.Struct, frozen=True):
    seq: int
    """Of the last row that was looked at; go on after it until it is `newest`."""
    hash: str
    """Of that row: keep the newest elsewhere, and a chain rewritten as a whole shows."""
    newest: int
    pruned: int
    """The row up to which all are pruned; 0: none."""
    broken: int | None
    """The first row that is not what was written, or is missing."""
    reason: str | None


class AuditController(Controller):
    path = "/audit"
    tags = ("audit",)

    @get(guards=[requires(ADMIN)])
    async def list_entries(
        self,
        request: AdminRequest,
        tenant: TenantName = None,
        object: FromQuery[str | None] = None,
        after: Annotated[int | None, QueryParameter(ge=1, le=MAX_SEQ)] = None,
        limit: Limit = 100,
    ) -> Page[AuditView]:
        """Newest first. `tenant` is an id, which outlives its tenant; `after` is a seq."""
        async with request.reading() as connection:
            found = await audit.list_entries(
                connection, tenant_id=tenant, object=object, before=after, limit=limit + 1
            )
        return page([AuditView.of(entry) for entry in found], limit)

    @get("/verify", guards=[requires(ADMIN)])
    async def verify(
        self,
        request: AdminRequest,
        after: Annotated[int, QueryParameter(ge=0, le=MAX_SEQ)] = 0,
        limit: Annotated[int, QueryParameter(ge=1, le=10_000)] = 2_000,
    ) -> VerificationView:
        """Recomputes the hashes of a part of the chain."""
        async with request.reading() as connection:
            seen = await audit.verify(connection, request.plane.config.pepper, after, limit)
        return VerificationView(
            seen.seq, seen.hash.hex(), seen.newest, seen.pruned, seen.broken, seen.reason
        )
