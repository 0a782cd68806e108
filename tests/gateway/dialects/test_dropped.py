"""What is taken without effect is documented: one table in the code, the same on the page."""

from __future__ import annotations

import re

from gateway.dialects.dropped import MAX_NAMED, MESSAGES, header_of
from tests.house import ROOT


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/use/api.md").read_text()
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", page, re.MULTILINE))
    assert {name: rows.get(name) for name in MESSAGES} == dict(MESSAGES)


def test_a_header_is_bounded() -> None:
    names = tuple(f"tools.web_search_2025{number:04}" for number in range(500))
    assert header_of(names).decode().split(", ") == list(names[:MAX_NAMED])
