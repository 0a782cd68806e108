"""The lock that every change of the catalog takes."""

from __future__ import annotations

from admin.database import Connection
from admin.queries import sql


async def lock_catalog(connection: Connection) -> None:
    """Keeps other transactions from changing the catalog until this one ends."""
    await connection.fetchval(sql["catalog_lock"])
