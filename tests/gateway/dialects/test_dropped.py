"""What is taken without effect is documented: one table a dialect, the same in code and page."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from gateway.dialects.dropped import CONVERSATIONS, MAX_NAMED, MESSAGES, RESPONSES, header_of
from tools.source_tree import ROOT


@pytest.mark.parametrize(
    ("page", "heading", "table"),
    [
        ("api-dialects.md", "Conversations", CONVERSATIONS),
        ("api-messages.md", "Dropped fields", MESSAGES),
        ("api-responses.md", "Dropped fields", RESPONSES),
    ],
)
def test_the_page_has_the_table(page: str, heading: str, table: Mapping[str, str]) -> None:
    text = (ROOT / "docs/use" / page).read_text()
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    assert dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)) == dict(table)


def test_a_header_is_bounded() -> None:
    names = tuple(f"tools.web_search_2025{number:04}" for number in range(500))
    assert header_of(names).decode().split(", ") == list(names[:MAX_NAMED])
