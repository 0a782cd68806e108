"""Creates that a client may repeat with the header Idempotency-Key: done once, answered alike.

What was answered is kept for a day, in the transaction of the change itself: after a crash there
are both or neither. A twin that comes meanwhile waits for the first one. A refusal changes nothing
and is not kept, so the header is free again.

An answer that holds a secret is not kept whole: what is secret follows from `Once.seed`, and that
from the pepper, a random nonce that is kept, and the header, which only the client has.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Annotated, Any

import msgspec
from litestar import Response
from litestar.params import HeaderParameter

from admin.database import EVERYTHING, Connection, Database
from admin.errors import AdminError, IdempotencyKeyReused
from admin.http.request import AdminRequest
from admin.queries import sql

log = logging.getLogger(__name__)

KEPT = timedelta(hours=24)
CLEANING_INTERVAL_S = 600.0

IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        pattern=r"^[!-~]{1,255}$(?!\n)",
        description="Again within 24 hours with the same request: the first answer, and no change.",
    ),
]


class Once(msgspec.Struct, frozen=True):
    """A create, while it is done."""

    connection: Connection
    """In the transaction of the change."""
    seed: bytes
    """32 bytes nobody can guess; of a repeated request those of the first."""


async def once(
    request: AdminRequest,
    header: str | None,
    create: Callable[[Once], Awaitable[msgspec.Struct]],
    finish: Callable[[bytes, bytes], bytes] | None = None,
) -> Response[Any]:
    """201 with what `create` returns, which is kept; done once for each header of the caller's.
    Answered when gateways know of it.

    finish: makes the body of the answer from that as JSON and the seed. Raises
    IdempotencyKeyReused if the header came before with another request.
    """
    async with request.transaction() as connection:
        if header is None:
            seed = secrets.token_bytes(32)
            answer = msgspec.json.encode(await create(Once(connection, seed)))
            was_done = False
        else:
            seed, answer, was_done = await _claim(request, connection, header, create)
    body = answer if finish is None else finish(answer, seed)
    headers = {"idempotent-replayed": "true"} if was_done else None
    return Response(body, media_type="application/json", headers=headers)


async def _claim(
    request: AdminRequest,
    connection: Connection,
    header: str,
    create: Callable[[Once], Awaitable[msgspec.Struct]],
) -> tuple[bytes, bytes, bool]:
    """Seed, answer, and whether it was done before."""
    pepper = request.plane.config.pepper
    row_id = _keyed(pepper, b"idempotency", request.user.id.encode(), header.encode())
    digest = await _digest(request)
    row = await connection.fetchrow(
        sql["idempotency_claim"], row_id, digest, secrets.token_bytes(32)
    )
    assert row is not None
    if row["request"] != digest:
        raise IdempotencyKeyReused(
            "this Idempotency-Key came before with another request", param="Idempotency-Key"
        )
    seed = _keyed(pepper, b"seed", row["nonce"], header.encode())
    if row["answer"] is not None:
        return seed, row["answer"].encode(), True
    answer = msgspec.json.encode(await create(Once(connection, seed)))
    await connection.execute(sql["idempotency_answer"], row_id, answer.decode())
    return seed, answer, False


async def forget_for_ever(database: Database) -> None:
    """Removes what was kept long enough, now and then."""
    while True:
        try:
            async with database.transaction(EVERYTHING) as connection:
                await connection.execute(sql["idempotency_forget"], KEPT)
        except AdminError as error:
            log.warning("could not forget what creates answered: %s", error)
        await asyncio.sleep(CLEANING_INTERVAL_S)


async def _digest(request: AdminRequest) -> bytes:
    parts = (
        request.method.encode(),
        request.scope["path"].encode(),
        request.scope["query_string"],
        await request.body(),
    )
    return hashlib.sha256(_joined(*parts)).digest()


def _keyed(pepper: bytes, *parts: bytes) -> bytes:
    return hmac.digest(pepper, _joined(*parts), hashlib.sha256)


def _joined(*parts: bytes) -> bytes:
    """No two lists of parts read the same."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)
