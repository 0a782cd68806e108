"""Creates that a client may repeat with the header Idempotency-Key: done once, answered alike.

What was answered is kept for a day, in the transaction of the change itself: after a crash there
are both or neither. A repeat that comes meanwhile waits for the first one. A refusal changes
nothing and is not kept, so the header is free again.

An answer that holds a secret is not kept whole: what is secret follows from the seed, and that
from the pepper, a random nonce that is kept, and the header, which only the client has.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from datetime import timedelta

import msgspec

from admin.database import EVERYTHING, Connection, Database
from admin.errors import IdempotencyKeyReused
from admin.queries import sql

KEPT = timedelta(hours=24)
CLEANING_INTERVAL_S = 600.0


Create = Callable[[Connection, bytes], Awaitable[msgspec.Struct]]
"""Makes something in the transaction of this connection, and returns the answer. Takes 32 random
bytes, the seed; of a repeated request those of the first."""


class Claim(msgspec.Struct, frozen=True):
    """A create with the header Idempotency-Key."""

    pepper: bytes
    key_id: str
    """Id of the caller's API key."""
    header: str
    digest: bytes
    """Digest of the whole request, from `digest_of`."""


async def done_once(
    connection: Connection, claim: Claim, create: Create
) -> tuple[bytes, bytes, bool]:
    """Seed, answer, and whether it was done before. Raises IdempotencyKeyReused if the header came
    before with another request."""
    pepper, header = claim.pepper, claim.header.encode()
    row_id = _keyed(pepper, b"idempotency", claim.key_id.encode(), header)
    row = await connection.fetchrow(
        sql["idempotency_claim"], row_id, claim.digest, secrets.token_bytes(32)
    )
    assert row is not None
    if row["request"] != claim.digest:
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
    """SHA-256 of a request's method, path, query and body."""
    return hashlib.sha256(_joined(*parts)).digest()


def _keyed(pepper: bytes, *parts: bytes) -> bytes:
    return hmac.digest(pepper, _joined(*parts), hashlib.sha256)


def _joined(*parts: bytes) -> bytes:
    """The parts with their lengths: no two lists of parts join to the same bytes."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)
