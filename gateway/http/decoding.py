"""From the bytes of a body to its struct, with the errors that name a field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from gateway.exceptions import InvalidRequest
from gateway.limits.bounds import MAX_TOKEN_IDS

MAX_BODY_BYTES = 10 << 20
MAX_NESTED = 1 << 16
"""Brackets and colons of a body together: each may become an object, which takes half a microsecond
to make. So many are in a megabyte of JSON that is sent as a text."""
SMALL_BYTES = 1 << 16
"""A body of fewer bytes cannot have more of anything than the bounds allow."""

T = TypeVar("T")
UNKNOWN_FIELD = re.compile(r"unknown field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?$")
PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>(?P<field>[^`.\[]*)[^`]*)`$")
REQUIRED = re.compile(r"missing required field `(?P<name>[^`]*)`")


def decode_request(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decodes and checks a body; InvalidRequest names the wrong, missing or unknown field, or says
    that there is more in it than may be decoded on the event loop."""
    if len(body) > SMALL_BYTES:
        _check_size(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None


def _check_size(body: bytes) -> None:
    """Counts what a decoder would make objects of. Raises InvalidRequest."""
    num_values = body.count(b",")
    num_nested = body.count(b"[") + body.count(b"{") + body.count(b":")
    if num_values > MAX_TOKEN_IDS or num_nested > MAX_NESTED:
        raise InvalidRequest(
            f"A body may have at most {MAX_TOKEN_IDS} commas and {MAX_NESTED} brackets and colons; "
            f"yours has {num_values} and {num_nested}. Send fewer prompts in one request.",
            code="request_too_large",
        )


def _explain(message: str) -> InvalidRequest:
    if found := UNKNOWN_FIELD.search(message):
        name, path = found["name"], found["path"]
        if path:
            return InvalidRequest(
                f"Unsupported field '{name}' in '{path}'.",
                param=re.split(r"[.\[]", path)[0],
                code="unsupported_parameter",
            )
        return InvalidRequest(
            f"Unsupported parameter: '{name}'.", param=name, code="unsupported_parameter"
        )
    if found := PATH.search(message):
        reason = message[: found.start()]
        return InvalidRequest(
            f"Invalid value for '{found['path'] or 'body'}': {reason}.",
            param=found["field"] or None,
        )
    missing = REQUIRED.search(message)
    return InvalidRequest(f"{message}.", param=missing["name"] if missing else None)
