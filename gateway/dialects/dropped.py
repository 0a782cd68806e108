"""What agents send that has no effect here: taken, and named in the answer's header
`loraplex-dropped`. Everything else that is not supported is refused.

The tables are those of docs/use/api.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MESSAGES: Mapping[str, str] = {
    "billing_header": "A line of the system prompt that begins with `x-anthropic-billing-header:` "
    "is cut out: its value changes with each request, and no prefix would be found again.",
    "cache_control": "Every prefix is cached; none has to be marked.",
    "citations": "Citations of text blocks that are sent back.",
    "context_management": "Nothing is taken out of a conversation.",
    "diagnostics": "There is no report of cache misses.",
    "inference_geo": "The workers are where the operator has put them.",
    "is_error": "Of a tool's result: chat templates know results only.",
    "redacted_thinking": "No model here can read it.",
    "service_tier": "The tenant's class of service holds.",
    "speed": "Every answer comes as fast as it can.",
    "thinking.options": "`budget_tokens` and `display`: `thinking` sets the template's variable "
    "`enable_thinking`, and reasoning is shown as it comes.",
    "tools.*": "Tools that Anthropic runs or defines, by their type, such as "
    "`tools.web_search_20250305`.",
    "tools.options": "`allowed_callers`, `defer_loading`, `eager_input_streaming` and "
    "`input_examples` of a tool.",
}
"""Of the Messages dialect: name to reason."""

MESSAGES_TOOL_TYPES = re.compile(
    r"(?:advisor|bash|browser|browser_toolset|code_execution|computer|computer_toolset|mcp_toolset"
    r"|memory|text_editor|tool_search_tool_bm25|tool_search_tool_regex|web_fetch|web_search)"
    r"(?:_20[0-9]{6})?"
)
"""Types of tools that Anthropic runs or defines."""

MAX_NAMED = 32
"""Names in one answer's header, at most."""


def header_of(dropped: tuple[str, ...]) -> bytes:
    """The value of the header `loraplex-dropped`."""
    return ", ".join(dropped[:MAX_NAMED]).encode()
