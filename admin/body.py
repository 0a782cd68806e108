"""The body of a request, of which there may be much and which may stop coming."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from admin.errors import Invalid, Stalled, TooLarge

_PLACE = re.compile(r"^(?P<reason>.*) - at (?:`key` in )?`\$(?P<path>[^`]*)`$", re.DOTALL)
_FIELD = re.compile(r"field `(?P<name>[^`]*)`$", re.DOTALL)


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


def decode_json(body: bytes, kind: Any) -> Any:
    """Raises Invalid, which names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"the body is not valid JSON: {error}", "invalid_json") from None


def _explain(message: str) -> Invalid:
    """In the decoder's words: which field is wrong, missing or unknown."""
    place = _PLACE.match(message)
    reason, path = (place["reason"], place["path"]) if place else (message, "")
    named = _FIELD.search(reason)
    field = f"{path}.{named['name']}" if named else path
    param = re.split(r"[.\[]", field.lstrip("."))[0][:64] or None
    where = f"{field.lstrip('.')[:128]}: " if path else ""
    return Invalid(f"{where}{reason[:512]}", param=param)
