"""Audit log in the form of a hash chain. Database triggers add a row in the transaction of each
change. `web/refused_keys.py` adds rows for refused keys.

A row's hash covers its fields and the hash of the previous row, so that changed or removed rows
break the chain. Rewriting all following rows would hide such a change, except from an operator who
kept a copy of the newest hash, which `verify` returns.

`admin/audit/retention.py` prunes old rows. A prune writes a checkpoint row with the number and the
hash of the last row removed, and `verify` begins after the removed rows. The checkpoint is sealed
by a keyed hash whose key is not in the database, so that the database's owner cannot hide a
deletion in a checkpoint.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from store.database import EVERYTHING, Connection, Database, Row
from store.errors import Invalid
from store.queries import fetch_all, sql
from store.records import Caller

BEGINNING = bytes(32)
"""Value that the first row has in place of a previous row's hash."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Actor(msgspec.Struct, frozen=True):
    """Originator of a change, as the audit log records it: caller, request id and address."""

    caller: Caller
    request_id: str
    address: str | None
    """Address of the client. None if no request caused the change."""

    @property
    def sees(self) -> str:
        """Id of the tenant whose rows the actor may see, or EVERYTHING for an administrator."""
        return EVERYTHING if self.caller.tenant_id is None else self.caller.tenant_id


class AuditView(msgspec.Struct, frozen=True):
    seq: int
    """Row number: 1, 2, 3, ..."""
    at: datetime
    key_id: str
    """Id of the key that made the change or was refused. 'system' if no request caused the change,
    and 'unknown' if a refused key does not exist."""
    tenant_id: str | None
    action: str
    """Name of the action, such as key.revoke, version.ready or alias.auto_rollback."""
    object: str
    details: dict[str, Any]
    """New or removed values of the object. For an update, {field: [before, after]}."""
    request_id: str | None
    address: str | None
    """Address of the client. None if no request caused the change."""
    hash: str
    """Hash of the row, in hex."""


class Checkpoint(msgspec.Struct, frozen=True):
    """Last pruned row, after which the chain now begins."""

    seq: int
    hash: bytes
    seal: bytes

    def is_sealed(self, pepper: bytes) -> bool:
        return hmac.compare_digest(self.seal, seal(pepper, self.seq, self.hash))


class VerificationView(msgspec.Struct, frozen=True):
    seq: int
    """Number of the last row verified. Continue after it until it equals `newest`."""
    hash: str
    """Hash of the last row verified, in hex. Store the newest hash elsewhere to detect a rewritten
    chain."""
    newest: int
    pruned: int
    """Number of the last pruned row, or 0."""
    broken: int | None
    """Number of the first row that was changed or is missing."""
    reason: str | None


@asynccontextmanager
async def changing(database: Database, actor: Actor) -> AsyncGenerator[Connection]:
    """Opens a transaction that sees only the actor's rows and logs its changes as the actor's."""
    async with database.transaction(actor.sees) as connection:
        values = actor.caller.id, actor.request_id, actor.address
        await connection.execute(sql["audit_actor"], *values)
        yield connection


async def list_entries(
    connection: Connection,
    *,
    tenant_id: str | None,
    object: str | None,
    before: int | None,
    limit: int,
) -> list[AuditView]:
    """Returns entries of the audit log whose numbers are less than `before`, newest first. A filter
    that is None matches every entry."""
    return await fetch_all(connection, AuditView, "audit_list", tenant_id, object, before, limit)


async def export_entries(
    connection: Connection, tenant_id: str | None, after: int, limit: int
) -> list[AuditView]:
    """Returns up to `limit` entries after the entry `after`, oldest first. Returns entries of all
    tenants if `tenant_id` is None."""
    return await fetch_all(connection, AuditView, "audit_export", tenant_id, after, limit)


async def verify(connection: Connection, pepper: bytes, after: int, limit: int) -> VerificationView:
    """Recomputes the hashes of up to `limit` rows after row `after`, without the database's own
    functions. For pruned rows, verifies the checkpoint instead."""
    newest: int = await connection.fetchval(sql["audit_newest"])
    checkpoint = await _checkpoint(connection)
    if checkpoint is not None and not checkpoint.is_sealed(pepper):
        reason = "the checkpoint that stands for it is forged"
        return VerificationView(after, BEGINNING.hex(), newest, 0, checkpoint.seq, reason)
    pruned = 0 if checkpoint is None else checkpoint.seq
    seq, last = after, await connection.fetchval(sql["audit_hash"], after) or BEGINNING
    if checkpoint is not None and after <= pruned:
        seq, last = pruned, checkpoint.hash
    for row in await connection.fetch(sql["audit_part"], after, limit):
        reason = _flaw(row, seq + 1, last)
        if reason is not None:
            return VerificationView(seq, last.hex(), newest, pruned, seq + 1, reason)
        seq, last = row["seq"], row["hash"]
    return VerificationView(seq, last.hex(), newest, pruned, None, None)


async def prune(
    connection: Connection, pepper: bytes, before: datetime, slack: timedelta, limit: int
) -> int:
    """Removes up to `limit` of the rows older than `before`, oldest first, and returns their
    number. Removes nothing and returns 0 unless the oldest row is older than `before` by `slack`.
    Raises Invalid and removes nothing if a row was changed."""
    oldest = await connection.fetchrow(sql["audit_oldest"], before, limit)
    if oldest is None or oldest["at"] is None or oldest["at"] > before - slack:
        return 0
    seen = await verify(connection, pepper, oldest["seq"] - 1, oldest["num"])
    if seen.broken is not None:
        raise Invalid(f"entry {seen.broken} of the audit log: {seen.reason}")
    sealed = seal(pepper, seen.seq, bytes.fromhex(seen.hash))
    await connection.execute(sql["audit_prune"], seen.seq, seen.hash, sealed.hex())
    return oldest["num"]


def seal(pepper: bytes, seq: int, hash: bytes) -> bytes:
    """Returns the keyed hash of a checkpoint."""
    return hmac.digest(pepper, b"loraplex audit checkpoint %d " % seq + hash, "sha256")


async def _checkpoint(connection: Connection) -> Checkpoint | None:
    """Returns the newest checkpoint, or None if there is none. If its row is malformed, returns a
    checkpoint with an empty seal."""
    row = await connection.fetchrow(sql["audit_checkpoint"])
    if row is None:
        return None
    try:
        hash, sealed = bytes.fromhex(row["hash"]), bytes.fromhex(row["seal"])
        return Checkpoint(int(row["object"]), hash, sealed)
    except (TypeError, ValueError):
        return Checkpoint(0, b"", b"")


def chain_hash(row: Mapping[str, Any]) -> bytes:
    """Returns the hash that a row should have. `details` must be the text from the database."""
    at = (row["at"] - EPOCH) // timedelta(microseconds=1)
    fields = (
        *(str(row["seq"]), str(at), row["key_id"], row["tenant_id"], row["action"]),
        *(row["object"], row["details"], row["request_id"]),
    )
    if row["address"] is not None:
        # Rows written before addresses were logged were hashed without an address.
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
