"""Checks text for the character U+0000, which Postgres cannot store."""

from __future__ import annotations

import re

import msgspec

from adapters.format.strict_json import find_nul
from store.errors import Invalid

REASON = "text may not have the character U+0000"


def check_text(text: str, param: str) -> None:
    """Raises Invalid, naming `param`, if the text cannot be stored."""
    if "\0" in text:
        raise Invalid(f"{param}: {REASON}", param=param)


def check_json(written: bytes, root: str = "") -> None:
    """Raises Invalid, naming the field, if valid JSON contains text that cannot be stored. `root`
    is the name under which errors refer to the JSON."""
    if rb"\u0000" not in written:
        return
    path = find_nul(msgspec.json.decode(written))
    if path is not None:
        shown = f"{root}.{path}".strip(".")
        param = re.split(r"[.\[]", shown)[0][:64]
        raise Invalid(f"{shown[:128]}: {REASON}" if shown else REASON, param=param or None)
