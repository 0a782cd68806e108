"""Reads request bodies that may be large, from clients that may stop sending."""

from __future__ import annotations

import asyncio
import re
from ast import literal_eval
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any, NamedTuple, get_args

import msgspec
from litestar.exceptions import InternalServerException
from msgspec.structs import fields

from admin.schemas import PATTERNS
from store.errors import Invalid
from store.stored_text import check_json
from web.body_budget import HeldBody
from web.choices import list_choices
from web.errors import Overloaded, Stalled, TooLarge

_PLACE = re.compile(r"^(?P<reason>.*) - at (?:`key` in )?`\$(?P<path>[^`]*)`$", re.DOTALL)
_DECIMAL = re.compile(rb"""null|"?[0-9.eE+-]+"?""")
_PATTERN = re.compile(r"matching regex (?P<text>'.*'|\".*\")$", re.DOTALL)
_FIELD = re.compile(r"field `(?P<name>[^`]*)`$", re.DOTALL)


async def keep_coming(
    chunks: AsyncIterator[bytes], idle_s: float, min_bytes: int
) -> AsyncIterator[bytes]:
    """Yields the chunks. Raises Stalled if fewer than `min_bytes` arrive during `idle_s` seconds of
    waiting for the client. Time that the consumer takes between chunks does not count."""
    loop = asyncio.get_running_loop()
    waited_s, num_bytes = 0.0, 0
    while True:
        began = loop.time()
        try:
            async with asyncio.timeout(idle_s - waited_s):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Stalled(f"fewer than {min_bytes} bytes came in {idle_s:g} s") from None
        waited_s += loop.time() - began
        num_bytes += len(chunk)
        if num_bytes >= min_bytes:
            waited_s, num_bytes = 0.0, 0
        yield chunk


class UploadPace(NamedTuple):
    """Minimum speed of an upload."""

    idle_s: float
    """Seconds of waiting for the client over which `min_rate` is averaged."""
    min_rate: int
    """Minimum bytes per second."""


async def held_chunks(chunks: AsyncIterator[bytes], held: HeldBody) -> AsyncIterator[bytes]:
    """Yields the body of the framework's request in chunks. `held` counts the body's bytes in
    memory. Raises Overloaded if too many bytes are in memory, and Stalled if the client
    disconnects."""
    try:
        async for chunk in chunks:
            if held.excess is not None:
                raise Overloaded("too many bytes of requests are being read", "too_many_body_bytes")
            yield chunk
    except InternalServerException:
        raise Stalled("the client left before its request was whole") from None


async def released_chunks(
    chunks: AsyncIterator[bytes], held: HeldBody, pace: UploadPace
) -> AsyncIterator[bytes]:
    """Yields the chunks, and releases the bytes of each chunk when the next one is requested.
    Raises Stalled if the upload is too slow."""
    min_bytes = round(pace.min_rate * pace.idle_s)
    async for chunk in keep_coming(chunks, pace.idle_s, min_bytes):
        yield chunk
        held.release(min(len(chunk), held.num_bytes))


async def read_all(chunks: AsyncIterator[bytes], max_bytes: int) -> bytes:
    """Returns the whole body. Raises TooLarge."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > max_bytes:
            raise TooLarge(f"the body has more than {max_bytes} bytes")
    return bytes(body)


def decode_json(body: bytes, kind: Any) -> Any:
    """Decodes JSON to `kind`. Raises Invalid, naming the field."""
    try:
        decoded = msgspec.json.decode(body, type=kind)
        if isinstance(decoded, msgspec.Struct):
            _check_decimals(body, type(decoded))
        check_json(body)
        return decoded
    except msgspec.ValidationError as error:
        raise _explain(list_choices(str(error), kind)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"the body is not valid JSON: {error}", "invalid_json") from None


def _check_decimals(body: bytes, kind: type[msgspec.Struct]) -> None:
    """Raises Invalid for numbers in a form that only Python accepts, such as 1_0, digits with
    spaces around them, or digits other than 0 to 9."""
    names = {f.encode_name for f in fields(kind) if Decimal in (f.type, *get_args(f.type))}
    if names:
        for name, text in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
            if name in names and not _DECIMAL.fullmatch(text):
                raise Invalid(f"{name}: a number such as 12.50 is expected", param=name)


def _explain(message: str) -> Invalid:
    """Returns the decoder's message as an error that names the wrong, missing or unknown field."""
    place = _PLACE.match(message)
    reason, path = (place["reason"], place["path"]) if place else (message, "")
    if pattern := _PATTERN.search(reason):
        reason = PATTERNS.get(literal_eval(pattern["text"]), reason)
    named = _FIELD.search(reason)
    field = f"{path}.{named['name']}" if named else path
    param = re.split(r"[.\[]", field.lstrip("."))[0][:64] or None
    where = f"{field.lstrip('.')[:128]}: " if path else ""
    return Invalid(f"{where}{reason[:512]}", param=param)
