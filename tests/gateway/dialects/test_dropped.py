"""What is taken without effect is documented: one table a dialect, the same in code and page; and
every field of a response has its place on the page."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from openai.types.responses.response_create_params import (
    ResponseCreateParamsBase as ResponseParams,
)

from gateway.dialects.chat_completions import ChatCompletionRequest
from gateway.dialects.dropped import CONVERSATIONS, MAX_NAMED, MESSAGES, RESPONSES, header_of
from gateway.dialects.responses_fields import ResponsesRequest
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


def test_every_field_of_a_response_has_its_place_on_the_page() -> None:
    """Effective, dropped, or refused by name."""
    section = (
        (ROOT / "docs/use/api-responses.md")
        .read_text()
        .split("## Refused and additional fields\n")[1]
        .split("\n## ")[0]
    )
    taken, schema = set(ResponseParams.__annotations__), set(ResponsesRequest.__struct_fields__)
    refused = names_in(section.split("these are refused:")[1].split(", and values of")[0])
    assert refused == taken - schema
    further = names_in(section.split("the route accepts")[1])
    assert schema - taken == {"stream", "client_metadata"} | further
    assert further <= set(ChatCompletionRequest.__struct_fields__)


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))
