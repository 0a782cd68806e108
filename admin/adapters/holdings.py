"""What a tenant has in the store, kept within its quota."""

from __future__ import annotations

from adapters.manifest import AdapterManifest
from admin.database import Connection
from admin.errors import Conflict
from admin.queries import from_row, sql
from admin.records import Quota


async def check_holdings(
    connection: Connection, tenant_id: str, name: str, manifest: AdapterManifest
) -> None:
    """Whether there is room for a version of this content under this name.

    Under the catalog's lock, so that no other comes in between. Raises Conflict.
    """
    row = await connection.fetchrow(sql["quota_find"], tenant_id)
    if row is None:
        return
    quota = from_row(Quota, row)
    held = await connection.fetchrow(sql["adapters_held"], tenant_id, name, manifest.digest)
    assert held is not None
    asked = {
        "adapters": (quota.adapters, held["adapters"], 0 if held["has_name"] else 1),
        "adapter_bytes": (
            quota.adapter_bytes,
            held["bytes"],
            0 if held["has_content"] else manifest.file_bytes,
        ),
    }
    for limit, (allowed, used, more) in asked.items():
        if allowed is not None and more > 0 and used + more > allowed:
            raise Conflict(
                f"this tenant may have {allowed} {limit} and has {used}, {more} more do not fit:"
                " delete what is not needed, or have an admin raise the limit",
                "adapter_quota_exceeded",
                limit,
                {"limit": limit, "allowed": allowed, "used": used, "asked": more},
            )
