"""The audit log: a hash chain that triggers write in the transaction of each change.

A row's hash covers its fields and the hash of the row before it, so what was changed or taken out
since shows where the chain breaks. Rewriting all rows that follow hides it, but not from an
operator with a copy of the newest hash: `verify` ends with it.

Old rows are pruned by `admin/audit/retention.py`. A prune leaves a row of the chain with the number
and the hash of the last row that it removed, and `verify` begins there. It is sealed by a keyed
hash whose key is not in the database: the database's owner cannot hide a deletion in one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from admin.database import EVERYTHING, Connection, Database, Row
from admin.errors import Invalid
from admin.queries import fetch_all, sql
from admin.records import ApiKey

BEGINNING = bytes(32)
"""Stands for the hash of the row before the first."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Actor(msgspec.Struct, frozen=True):
    """On whose behalf something changes."""

    key: ApiKey
    request_id: str
    address: str | None
    """The client's address; None where no request made the change."""

    @property
    def sees(self) -> str:
        """As `Database.transaction` takes it."""
        return EVERYTHING if self.key.tenant_id is None else self.key.tenant_id


class AuditFields(msgspec.Struct, frozen=True):
    """What a row says; its hashes come after it."""

    seq: int
    """1, 2, 3, ..."""
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
    """The client's address; None where no request made the change."""


class AuditEntry(AuditFields, frozen=True):
    prev: bytes
    hash: bytes


class Checkpoint(msgspec.Struct, frozen=True):
    """Where the chain begins once older rows are pruned."""

    seq: int
    """Number of the last row that was pruned."""
    hash: bytes
    """Hash of that row."""
    seal: bytes

    def is_sealed(self, pepper: bytes) -> bool:
        return hmac.compare_digest(self.seal, seal(pepper, self.seq, self.hash))


class Verification(msgspec.Struct, frozen=True):
    """What the check of one part of the chain found."""

    seq: int
    """Number of the last row that was looked at; the next part begins after it."""
    hash: bytes
    """Hash of that row."""
    newest: int
    """Number of the last row there is."""
    pruned: int = 0
    """The row up to which all are pruned; 0: none."""
    broken: int | None = None
    """The first row that is not what was written, or is missing."""
    reason: str | None = None


@asynccontextmanager
async def changing(database: Database, actor: Actor) -> AsyncGenerator[Connection]:
    """A transaction that sees what the actor may, and whose changes are logged as the actor's."""
    async with database.transaction(actor.sees) as connection:
        await connection.execute(sql["audit_actor"], actor.key.id, actor.request_id, actor.address)
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
    return await fetch_all(connection, AuditEntry, "audit_list", tenant_id, object, before, limit)


async def verify(connection: Connection, pepper: bytes, after: int, limit: int) -> Verification:
    """Recomputes up to `limit` hashes of the rows after `after`, without help of the database.
    Rows that are pruned are not looked at, but the checkpoint that stands for them is."""
    newest: int = await connection.fetchval(sql["audit_newest"])
    checkpoint = await _checkpoint(connection)
    if checkpoint is not None and not checkpoint.is_sealed(pepper):
        reason = "the checkpoint that stands for it is forged"
        return Verification(after, BEGINNING, newest, 0, checkpoint.seq, reason)
    pruned = 0 if checkpoint is None else checkpoint.seq
    seq, last = after, await connection.fetchval(sql["audit_hash"], after) or BEGINNING
    if checkpoint is not None and after <= pruned:
        seq, last = pruned, checkpoint.hash
    for row in await connection.fetch(sql["audit_part"], after, limit):
        reason = _flaw(row, seq + 1, last)
        if reason is not None:
            return Verification(seq, last, newest, pruned, seq + 1, reason)
        seq, last = row["seq"], row["hash"]
    return Verification(seq, last, newest, pruned)


async def prune(
    connection: Connection, pepper: bytes, before: datetime, slack: timedelta, limit: int
) -> int:
    """Removes up to `limit` rows from before `before`, oldest first, and returns how many; none if
    the oldest is not older by `slack`. Raises Invalid if they are not what was written: nothing is
    removed then."""
    oldest = await connection.fetchrow(sql["audit_oldest"], before, limit)
    if oldest is None or oldest["at"] is None or oldest["at"] > before - slack:
        return 0
    seen = await verify(connection, pepper, oldest["seq"] - 1, oldest["num"])
    if seen.broken is not None:
        raise Invalid(f"entry {seen.broken} of the audit log: {seen.reason}")
    sealed = seal(pepper, seen.seq, seen.hash)
    await connection.execute(sql["audit_prune"], seen.seq, seen.hash.hex(), sealed.hex())
    return oldest["num"]


def seal(pepper: bytes, seq: int, hash: bytes) -> bytes:
    """Keyed hash of a checkpoint."""
    return hmac.digest(pepper, b"loraplex audit checkpoint %d " % seq + hash, "sha256")


async def _checkpoint(connection: Connection) -> Checkpoint | None:
    """The newest; what is no checkpoint at all is one without a seal."""
    row = await connection.fetchrow(sql["audit_checkpoint"])
    if row is None:
        return None
    try:
        hash, sealed = bytes.fromhex(row["hash"]), bytes.fromhex(row["seal"])
        return Checkpoint(int(row["object"]), hash, sealed)
    except (TypeError, ValueError):
        return Checkpoint(0, b"", b"")


def chain_hash(row: Mapping[str, Any]) -> bytes:
    """What the hash of a row must be; `details` is text as the database writes it."""
    at = (row["at"] - EPOCH) // timedelta(microseconds=1)
    fields = (
        *(str(row["seq"]), str(at), row["key_id"], row["tenant_id"], row["action"]),
        *(row["object"], row["details"], row["request_id"]),
    )
    if row["address"] is not None:
        # Rows from before there were addresses are as they were hashed then.
        fields += (row["address"],)
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
