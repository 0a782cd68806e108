"""Every field of the official client's requests, and of vLLM's, and what becomes of it."""

from __future__ import annotations

import re
from pathlib import Path

from openai.types.responses.response_create_params import (
    ResponseCreateParamsBase as ResponseParams,
)

from gateway.dialects.chat_completions import ChatCompletionRequest
from gateway.dialects.responses_fields import ResponsesRequest

PAGE = Path(__file__).parents[3] / "docs/use/api-responses.md"


def test_every_field_of_a_response_has_its_place_on_the_page() -> None:
    """Effective, dropped, or refused by name."""
    section = PAGE.read_text().split("## Refused and additional fields\n")[1].split("\n## ")[0]
    taken, schema = set(ResponseParams.__annotations__), set(ResponsesRequest.__struct_fields__)
    refused = names_in(section.split("these are refused:")[1].split(", and values of")[0])
    assert refused == taken - schema
    further = names_in(section.split("the route accepts")[1])
    assert schema - taken == {"stream", "client_metadata"} | further
    assert further <= set(ChatCompletionRequest.__struct_fields__)


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))
