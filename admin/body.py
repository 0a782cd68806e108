"""The body of a request, of which there may be much and which may stop coming."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from admin.errors import Stalled, TooLarge


async def keep_coming(chunks: AsyncIterator[bytes], idle_s: float) -> AsyncIterator[bytes]:
    """The same chunks. Raises Stalled when none comes for so long."""
    while True:
        try:
            async with asyncio.timeout(idle_s):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Stalled(f"nothing came for {idle_s:g} s") from None
        yield chunk


async def read_all(chunks: AsyncIterator[bytes], max_bytes: int) -> bytes:
    """Raises TooLarge."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > max_bytes:
            raise TooLarge(f"the body has more than {max_bytes} bytes")
    return bytes(body)
