"""Error messages that list the values a field may have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from msgspec import inspect

_NO_CHOICE = re.compile(
    r"^Invalid (?:enum )?value (?P<value>.*?) - at (?:`key` in )?`\$(?P<path>.*)`$"
)
_STEP = re.compile(r"\.(?P<field>[^.\[]+)|\[(?:\.\.\.|\d+)\]")


def list_choices(message: str, kind: Any) -> str:
    """Adds the allowed values to msgspec's message about an invalid value.

    `kind` is the type that was decoded. Other messages are returned unchanged.
    """
    found = _NO_CHOICE.match(message)
    if found is None:
        return message
    types, last = [_type_info(kind)], ""
    for step in _STEP.finditer(found["path"]):
        last = step["field"] or ""
        parents = types
        types = [each for parent in parents for each in _below(parent, last)]
        if not types:
            # The field is the tag that selects a struct of a union.
            return _listed(message, _tags(parents, last))
    return _listed(message, (value for each in _flat(types) for value in _values(each)))


@lru_cache(maxsize=64)
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _below(parent: inspect.Type, field: str) -> list[inspect.Type]:
    """Returns the types to which one step of the path can lead: the types of a field, of a list's
    items, or of a dictionary's values."""
    found: list[inspect.Type] = []
    for each in _flat([parent]):
        match each:
            case inspect.StructType() if field:
                found += [one.type for one in each.fields if one.encode_name == field]
            case inspect.CollectionType() if not field:
                found.append(each.item_type)
            case inspect.DictType() if not field:
                found.append(each.value_type)
            case _:
                pass
    return found


def _flat(types: Iterable[inspect.Type]) -> list[inspect.Type]:
    """Returns the types with unions replaced by their members and without metadata."""
    flat: list[inspect.Type] = []
    for each in types:
        match each:
            case inspect.UnionType():
                flat += _flat(each.types)
            case inspect.Metadata():
                flat += _flat([each.type])
            case _:
                flat.append(each)
    return flat


def _tags(types: Iterable[inspect.Type], field: str) -> list[Any]:
    structs = (each for each in _flat(types) if isinstance(each, inspect.StructType))
    return [each.tag for each in structs if each.tag_field == field]


def _values(each: inspect.Type) -> list[Any]:
    match each:
        case inspect.LiteralType():
            return [*each.values]
        case inspect.EnumType():
            return [member.value for member in each.cls]
        case _:
            return []


def _listed(message: str, values: Iterable[Any]) -> str:
    allowed = ", ".join(repr(value) for value in dict.fromkeys(values))
    if not allowed:
        return message
    text, separator, place = message.rpartition(" - at ")
    return f"{text}; allowed: {allowed}{separator}{place}"
