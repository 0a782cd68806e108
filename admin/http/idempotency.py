"""Header Idempotency-Key, with which a client may repeat a creating request safely."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from litestar import Response
from litestar.params import HeaderParameter

from admin.http.request import AdminRequest
from admin.idempotency import Create, digest_of, done_once

IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        pattern=r"^[!-~]{1,255}$(?!\n)",
        description="Again within 24 hours with the same request: the first answer, and no change.",
    ),
]

Finish = Callable[[bytes, bytes], bytes]
"""Function that makes the body of an answer from the stored JSON and the seed."""


async def once(
    request: AdminRequest,
    header: str | None,
    create: Create,
    finish: Finish | None = None,
) -> Response[Any]:
    """Runs `create` once for each value of the caller's header, and stores the result. Waits until
    gateways know of the change, and answers 201. A repeated call gets the stored result.

    `finish` makes the body of the answer from the stored JSON and a seed. Both are the same for a
    repeated call. Raises IdempotencyKeyReused if the header was used for another request.
    """
    async with request.transaction() as connection:
        if header is None:
            seed = secrets.token_bytes(32)
            answer = msgspec.json.encode(await create(connection, seed))
            was_done = False
        else:
            caller = request.plane.config.pepper, request.user.id
            digest = await _digest(request)
            seed, answer, was_done = await done_once(connection, *caller, header, digest, create)
    body = answer if finish is None else finish(answer, seed)
    headers = {"idempotent-replayed": "true"} if was_done else None
    return Response(body, media_type="application/json", headers=headers)


async def _digest(request: AdminRequest) -> bytes:
    return digest_of(
        request.method.encode(),
        request.scope["path"].encode(),
        request.scope["query_string"],
        await request.body(),
    )
