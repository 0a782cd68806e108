"""Makes requests that create an object safe to repeat with the header Idempotency-Key: the object
is created once, and each repeated request gets the same answer.

The answer is stored for a day, in the transaction that creates the object, so that a crash loses
both or neither. A repeated request that arrives during the first request waits for the answer. An
error is not stored, because the failed request changed nothing, so the client can use the header
again.

A secret in an answer is not stored. The secret is derived from a seed, and the seed is derived from
the pepper, a stored random nonce, and the header, which only the client has.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from datetime import timedelta

import msgspec

from store.database import EVERYTHING, Connection, Database
from store.queries import sql
from web.errors import IdempotencyKeyReused

KEPT = timedelta(hours=24)
CLEANING_INTERVAL_S = 600.0


Create = Callable[[Connection, bytes], Awaitable[msgspec.Struct]]
"""Function that creates an object in the connection's transaction and returns the answer. Takes the
connection, and a seed for secrets: 32 random bytes that are the same for a repeated request."""


async def done_once(
    connection: Connection, pepper: bytes, caller_id: str, given: str, digest: bytes, create: Create
) -> tuple[bytes, bytes, bool]:
    """Returns the seed, the answer, and whether an earlier request stored this answer. Calls
    `create` and stores its answer if no earlier request did.

    `caller_id` is the caller's id, `given` is the header's value, and `digest` is the
    digest of the whole request, from `digest_of`. Raises IdempotencyKeyReused if the header was
    used for another request.
    """
    header = given.encode()
    row_id = _keyed(pepper, b"idempotency", caller_id.encode(), header)
    row = await connection.fetchrow(
        sql["idempotency_claim"], row_id, digest, secrets.token_bytes(32)
    )
    assert row is not None
    if row["request"] != digest:
        raise IdempotencyKeyReused(
            "this Idempotency-Key came before with another request", param="Idempotency-Key"
        )
    seed = _keyed(pepper, b"seed", row["nonce"], header)
    if row["answer"] is not None:
        return seed, row["answer"].encode(), True
    answer = msgspec.json.encode(await create(connection, seed))
    await connection.execute(sql["idempotency_answer"], row_id, answer.decode())
    return seed, answer, False


async def forget(database: Database) -> None:
    """Removes answers older than `KEPT`."""
    async with database.transaction(EVERYTHING) as connection:
        await connection.execute(sql["idempotency_forget"], KEPT)


def digest_of(*parts: bytes) -> bytes:
    """Returns the SHA-256 of a request's method, path, query and body."""
    return hashlib.sha256(_joined(*parts)).digest()


def _keyed(pepper: bytes, *parts: bytes) -> bytes:
    return hmac.digest(pepper, _joined(*parts), hashlib.sha256)


def _joined(*parts: bytes) -> bytes:
    """Joins the parts with their lengths, so that different lists never give the same bytes."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)
