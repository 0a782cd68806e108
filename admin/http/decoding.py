"""Decodes the bodies of requests, with errors that name a field."""

from __future__ import annotations

import re
from ast import literal_eval
from decimal import Decimal
from typing import Any, get_args

import msgspec
from msgspec.structs import fields

from admin.schemas import PATTERNS
from store.errors import Invalid
from store.stored_text import check_json
from web.decoding import Fault, decoder_of, find_fault, first_step
from web.lone_surrogates import replace_lone_surrogates

_DECIMAL = re.compile(rb"""null|"?[0-9.eE+-]+"?""")
_PATTERN = re.compile(r"matching regex (?P<text>'.*'|\".*\")$", re.DOTALL)


def decode_json(body: bytes, kind: Any) -> Any:
    """Decodes JSON to `kind`. Raises Invalid, naming the field."""
    try:
        decoded = decoder_of(kind).decode(body)
        if isinstance(decoded, msgspec.Struct):
            _check_decimals(body, type(decoded))
        check_json(body)
        return decoded
    except msgspec.ValidationError as error:
        raise _explain(find_fault(error, kind)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if replace_lone_surrogates(body) is not body:
            raise Invalid("the body has half a surrogate pair", "invalid_json") from None
        raise Invalid(f"the body is not valid JSON: {error}", "invalid_json") from None


def _check_decimals(body: bytes, kind: type[msgspec.Struct]) -> None:
    """Raises Invalid for numbers in a form that only Python accepts, such as 1_0, digits with
    spaces around them, or digits other than 0 to 9."""
    names = {f.encode_name for f in fields(kind) if Decimal in (f.type, *get_args(f.type))}
    if names:
        for name, text in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
            if name in names and not _DECIMAL.fullmatch(text):
                raise Invalid(f"{name}: a number such as 12.50 is expected", param=name)


def _explain(fault: Fault) -> Invalid:
    """Returns an error that names the wrong, missing or unknown field."""
    reason, field = fault.reason, fault.field
    if pattern := _PATTERN.search(reason):
        reason = PATTERNS.get(literal_eval(pattern["text"]), reason)
    where = f"{field[:128]}: " if fault.path else ""
    return Invalid(f"{where}{reason[:512]}", param=first_step(field)[:64] or None)
