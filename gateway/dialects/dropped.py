"""What agents send that has no effect here: taken, and named in the answer's header
`loraplex-dropped`. Everything else that is not supported is refused.

The tables are those of docs/use/api.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

FOLDED_TURNS = "folded_turns"
UNBOUNDED_THOUGHT = "thinking.budget_tokens"

CONVERSATIONS: Mapping[str, str] = {
    FOLDED_TURNS: "The chat template refused the turns as they came. Instructions in the middle "
    "became a user's turn, turns of one role were joined, calls of one turn parted, or calls and "
    "results written as text.",
}
"""What chats, Messages and Responses drop of a conversation: name to reason."""

MESSAGES: Mapping[str, str] = {
    "billing_header": "A line of the system prompt that begins with `x-anthropic-billing-header:` "
    "is cut out: its value changes with each request, and no prefix would be found again.",
    "cache_control": "Every prefix is cached; none has to be marked.",
    "citations": "Citations of text blocks that are sent back.",
    "context_management": "Nothing is taken out of a conversation.",
    "diagnostics": "There is no report of cache misses.",
    "inference_geo": "The workers are where the operator has put them.",
    "is_error": "That a tool failed: chat templates know results only.",
    "redacted_thinking": "No model here can read it.",
    "service_tier": "The tenant's class of service holds.",
    "speed": "Every answer comes as fast as it can.",
    UNBOUNDED_THOUGHT: "Where the model's `<think>` and `</think>` are no tokens of their own.",
    "thinking.display": "Reasoning is shown as it comes.",
    "tools.*": "Tools that Anthropic runs or defines, by their type, such as "
    "`tools.web_search_20250305`.",
    "tools.options": "`allowed_callers`, `defer_loading`, `eager_input_streaming` and "
    "`input_examples` of a tool.",
}
"""What the Messages dialect drops: name to reason."""

MESSAGES_TOOL_TYPES = re.compile(
    r"(?:advisor|bash|browser|browser_toolset|code_execution|computer|computer_toolset|mcp_toolset"
    r"|memory|text_editor|tool_search_tool_bm25|tool_search_tool_regex|web_fetch|web_search)"
    r"(?:_20[0-9]{6})?"
)
"""Types of tools that Anthropic runs or defines."""

RESPONSES: Mapping[str, str] = {
    "client_metadata": "What an application notes of its own session.",
    "max_tool_calls": "It counts calls of tools that a vendor runs; there are none.",
    "phase": "The phase of a message that is sent back.",
    "prompt_cache_key": "Every prefix is cached; requests go where it is.",
    "prompt_cache_options": "As `prompt_cache_key`.",
    "prompt_cache_retention": "As `prompt_cache_key`.",
    "reasoning.options": "`context`, `generate_summary`, `mode` and `summary`: reasoning is shown "
    "as it comes.",
    "reasoning_items": "Summaries of reasoning that is sent back, and what a vendor encrypted; "
    "its text is taken.",
    "service_tier": "The tenant's class of service holds.",
    "stream_options": "`include_obfuscation`: streams are not padded.",
    "text.verbosity": "Models have no levels of it.",
    "tools.*": "Tools that a vendor runs or defines, by their type, such as `tools.web_search`.",
    "truncation": "`auto`: a conversation that is too long is refused, not cut.",
}
"""What the Responses dialect drops: name to reason."""

RESPONSES_TOOL_TYPES = re.compile(
    r"(?:apply_patch|code_interpreter|computer|computer_use_preview|custom|file_search"
    r"|image_generation|local_shell|mcp|namespace|programmatic_tool_calling|shell|tool_search"
    r"|web_search|web_search_preview)(?:_20[0-9]{2}_[0-9]{2}_[0-9]{2})?"
)
"""Types of tools that OpenAI runs or defines."""

MAX_NAMED = 32
"""Names in one answer's header, at most."""


def header_of(dropped: tuple[str, ...]) -> bytes:
    """The value of the header `loraplex-dropped`."""
    return ", ".join(dropped[:MAX_NAMED]).encode()
