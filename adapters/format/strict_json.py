"""Decoder of untrusted JSON, which refuses duplicate keys, NaN and nesting that is too deep."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from adapters.errors import AdapterRejected

Json = dict[str, "Json"] | list["Json"] | str | float | None


def decode_object(raw: bytes, code: str, field: str) -> dict[str, Any]:
    """Returns the JSON object in `raw`. Raises AdapterRejected(`code`, `field`) if `raw` is
    not one JSON object, has duplicate keys or NaN, or is nested too deeply."""

    def reject(reason: str) -> NoReturn:
        raise AdapterRejected(code, field, reason, "one JSON object without duplicate keys")

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            reject("a duplicate key")
        return result

    def refuse_constant(name: str) -> NoReturn:
        reject(name)

    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=collect, parse_constant=refuse_constant
        )
    except RecursionError:
        reject("nested too deeply")
    except ValueError as error:
        reject(str(error))
    if not isinstance(value, dict):
        reject(f"a JSON {type(value).__name__}")
    return value  # pyright: ignore[reportUnknownVariableType]


def find_nul(value: Json) -> str | None:
    """Returns the path of a string that contains the character U+0000, or of an object that has
    such a string as a key. Returns None if there is no such string. PostgreSQL and C libraries do
    not accept the character."""
    # Not recursive, because decoders accept deeper nesting than Python's call stack allows.
    waiting = [("", value)]
    while waiting:
        path, each = waiting.pop()
        match each:
            case str() if "\0" in each:
                return path
            case list():
                waiting += [(f"{path}[{place}]", item) for place, item in enumerate(each)]
            case dict() if any("\0" in key for key in each):
                return path
            case dict():
                waiting += [(f"{path}.{key}".lstrip("."), item) for key, item in each.items()]
            case _:
                pass
    return None
