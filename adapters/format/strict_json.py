"""JSON from strangers: no duplicate keys, no NaN, no depth bombs."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from adapters.errors import AdapterRejected


def decode_object(raw: bytes, code: str, field: str) -> dict[str, Any]:
    """The JSON object in `raw`. Raises AdapterRejected(`code`, `field`) for anything else."""

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
