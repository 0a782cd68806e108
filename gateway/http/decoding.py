"""Decodes the bytes of a body to its struct, with errors that name a field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

import msgspec

from gateway.dialects.history import is_absent
from gateway.exceptions import InvalidRequest
from gateway.limits.bounds import MAX_TOKEN_IDS
from web.choices import list_choices

MAX_BODY_BYTES = 10 << 20
MAX_NESTED = 1 << 16
"""Maximum number of `[`, `{` and `:` in a body. Each may become a Python object, which takes 0.5
µs to create. 1 MiB of JSON inside a string of the body has about this many."""
SMALL_BYTES = 1 << 16
"""Maximum bytes of a body that is decoded without counting its values. A body of this size cannot
have too many values."""

MAX_SEARCHED = 1024
"""Maximum entries of a mapping that are searched for the invalid one."""

T = TypeVar("T")
UNKNOWN_FIELD = re.compile(r"unknown field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?$")
PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>(?P<field>[^`.\[]*)[^`]*)`$")
REQUIRED = re.compile(r"missing required field `(?P<name>[^`]*)`")


def decode_request(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decodes and checks a body. Raises InvalidRequest, which names the invalid, missing or unknown
    field, or says that the body has too many values to be decoded on the event loop."""
    if len(body) > SMALL_BYTES:
        _check_size(body)
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            given = msgspec.json.decode(body)
            asked = _without_absent(given, decoder.type)
            if asked == given:
                raise _explain(error, decoder.type, given) from None
        try:
            return msgspec.convert(asked, decoder.type, str_keys=True)
        except msgspec.ValidationError as error:
            raise _explain(error, decoder.type, asked) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None


def _without_absent(given: Any, kind: Any) -> Any:
    """Returns `given` without null, [] and {} in fields that the schema lacks or that do not allow
    this value. Does the same in nested objects. `kind`: type that `given` is decoded to."""
    types = _fields_of(kind)
    if not types or not isinstance(given, dict):
        return given
    fields = cast(dict[str, Any], given)
    return {
        name: _without_absent(value, types.get(name))
        for name, value in fields.items()
        if not is_absent(value) or (name in types and _fits(value, types[name]))
    }


@cache
def _fields_of(kind: Any) -> dict[str, Any]:
    """Returns the types of the fields that an object of this type may have, by name."""
    return {
        field.encode_name: field.type
        for struct in _structs_in(kind)
        for field in msgspec.structs.fields(struct)
    }


def _structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Yields the struct types that a value of this type may have."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    elif get_origin(kind) in (Annotated, Union, UnionType):
        for part in get_args(kind):
            yield from _structs_in(part)


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError:
        return False
    return True


def _check_size(body: bytes) -> None:
    """Raises InvalidRequest if decoding the body would create too many objects."""
    num_values = body.count(b",")
    num_nested = body.count(b"[") + body.count(b"{") + body.count(b":")
    if num_values > MAX_TOKEN_IDS or num_nested > MAX_NESTED:
        raise InvalidRequest(
            f"A body may have at most {MAX_TOKEN_IDS} commas and {MAX_NESTED} brackets and colons; "
            f"yours has {num_values} and {num_nested}. Send fewer prompts in one request.",
            code="request_too_large",
        )


def _explain(error: msgspec.ValidationError, kind: Any, given: Any) -> InvalidRequest:
    message = list_choices(str(error), kind)
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
        reason, path = message[: found.start()], found["path"] or "body"
        key = _wrong_key(given, kind, found["field"])
        place = f"'{path}'" if key is None else f"the key '{key[:64]}' of '{found['field']}'"
        return InvalidRequest(f"Invalid value for {place}: {reason}.", param=found["field"] or None)
    if found := REQUIRED.search(message):
        name = found["name"]
        hint = " GET /v1/models lists those of your key." if name == "model" else ""
        return InvalidRequest(f"Missing required parameter: '{name}'.{hint}", param=name)
    return InvalidRequest(f"{message}.")


def _wrong_key(given: Any, kind: Any, field: str) -> str | None:
    """Returns the key of the first invalid entry in a field that is a mapping. Returns None if the
    field is not a mapping or has too many entries."""
    entries: Any = given.get(field) if isinstance(given, dict) else None  # pyright: ignore
    if not isinstance(entries, dict) or len(entries) > MAX_SEARCHED:  # pyright: ignore
        return None
    mapping, entries = _fields_of(kind).get(field), cast(dict[str, Any], entries)
    if not _maps(mapping):
        return None
    return next((key for key in entries if not _fits({key: entries[key]}, mapping)), None)


def _maps(kind: Any) -> bool:
    """Returns whether a value of this type may be a mapping."""
    if get_origin(kind) in (Annotated, Union, UnionType):
        return any(map(_maps, get_args(kind)))
    return get_origin(kind) is dict
