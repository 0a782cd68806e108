"""The audit log: a hash chain that triggers write in the transaction of each change.

A row's hash covers its fields and the hash of the row before it, so what was changed or taken out
since shows where the chain breaks. Only who rewrites all that follows escapes that, and not from
somebody who kept the newest hash: `verify` ends with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from admin.database import EVERYTHING, Connection, Database, Row
from admin.queries import from_row, sql
from admin.records import ApiKey

BEGINNING = bytes(32)
"""Stands for the hash of the row before the first."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Actor(msgspec.Struct, frozen=True):
    """On whose behalf something changes."""

    key: ApiKey
    request_id: str

    @property
    def sees(self) -> str:
        """As `Database.transaction` takes it."""
        return EVERYTHING if self.key.tenant_id is None else self.key.tenant_id


class AuditEntry(msgspec.Struct, frozen=True):
    seq: int
    """1, 2, 3, ..."""
    at: datetime
    key_id: str
    """'system': nobody's request."""
    tenant_id: str | None
    action: str
    """Such as key.revoke, version.ready, alias.auto_rollback."""
    object: str
    details: dict[str, Any]
    """What is there since, or was until then; of an update {field: [before, after]}."""
    request_id: str | None
    prev: bytes
    hash: bytes


class Verification(msgspec.Struct, frozen=True):
    """Of one part of the chain."""

    seq: int
    """Of the last row that was looked at; where the next part begins."""
    hash: bytes
    """Of that row."""
    newest: int
    """Of the last row there is."""
    broken: int | None = None
    """The first row that is not what was written, or is missing."""
    reason: str | None = None


@asynccontextmanager
async def changing(database: Database, actor: Actor) -> AsyncGenerator[Connection]:
    """A transaction that sees what the actor may, and whose changes are logged as the actor's."""
    async with database.transaction(actor.sees) as connection:
        await connection.execute(sql["audit_actor"], actor.key.id, actor.request_id)
        yield connection


async def list_entries(
    connection: Connection,
    *,
    tenant_id: str | None,
    object: str | None,
    before: int | None,
    limit: int,
) -> list[AuditEntry]:
    """Newest first; None of a filter: all."""
    rows = await connection.fetch(sql["audit_list"], tenant_id, object, before, limit)
    return [from_row(AuditEntry, row) for row in rows]


async def verify(connection: Connection, after: int, limit: int) -> Verification:
    """Recomputes up to `limit` hashes of the rows after `after`, without help of the database."""
    newest: int = await connection.fetchval(sql["audit_newest"])
    seq, last = after, await connection.fetchval(sql["audit_hash"], after) or BEGINNING
    for row in await connection.fetch(sql["audit_part"], after, limit):
        reason = _flaw(row, seq + 1, last)
        if reason is not None:
            return Verification(seq, last, newest, seq + 1, reason)
        seq, last = row["seq"], row["hash"]
    return Verification(seq, last, newest)


def chain_hash(row: Mapping[str, Any]) -> bytes:
    """What the hash of a row must be; `details` is text as the database writes it."""
    at = (row["at"] - EPOCH) // timedelta(microseconds=1)
    fields = (
        *(str(row["seq"]), str(at), row["key_id"], row["tenant_id"], row["action"]),
        *(row["object"], row["details"], row["request_id"]),
    )
    return hashlib.sha256(row["prev"] + b"".join(map(_field, fields))).digest()


def _flaw(row: Row, seq: int, prev: bytes) -> str | None:
    if row["seq"] != seq:
        return "it is missing"
    if row["prev"] != prev:
        return "it does not follow the row before it"
    if row["hash"] != chain_hash(row):
        return "it is not what was written"
    return None


def _field(value: str | None) -> bytes:
    if value is None:
        return b"\x00"
    text = value.encode()
    return b"\x01" + len(text).to_bytes(4, "big") + text
