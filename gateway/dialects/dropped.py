"""Fields of agents that have no effect here. They are accepted, and named in the answer's header
`loraplex-dropped`. All other unsupported fields are refused.

The tables are those of docs/use/api.md.
"""

from __future__ import annotations

from collections.abc import Mapping

FOLDED_TURNS = "folded_turns"
UNBOUNDED_THOUGHT = "thinking.budget_tokens"

WITHOUT_EFFECT = frozenset(
    (
        *("annotations", "async_", "audio", "cache_control", "caller", "citations"),
        *("extra_content", "id", "index", "metadata", "phase", "provider_specific_fields"),
        *("reasoning_details", "status", "thinking_blocks"),
    )
)
"""Fields that clients return or add inside messages, parts, calls, items and tools."""

CONVERSATIONS: Mapping[str, str] = {
    "arguments": "Arguments of a call that are no JSON object, as of one that was cut off. The "
    "call stands in the prompt without arguments.",
    "calls": "Calls without a name.",
    "content.*": "Content of a kind that is not text, such as `content.image`. A short text stands "
    "in its place, such as `[image omitted]`.",
    "fields.*": "Fields of history that are not known.",
    FOLDED_TURNS: "The chat template refused the turns as they came. Instructions in the middle "
    "became a user's turn, turns of one role were joined, calls of one turn parted, or calls and "
    "results written as text.",
    "is_error": "That a tool failed: chat templates know results only.",
    "items.*": "Items that are neither text nor calls nor results, such as "
    "`items.web_search_call`.",
    "reasoning_items": "What a vendor encrypted of reasoning that is sent back, and summaries "
    "beside its text.",
    "redacted_thinking": "No model here can read it.",
    "tools.*": "Tools that are not functions, by their type, such as `tools.web_search`.",
    "tools.options": "`allowed_callers`, `defer_loading`, `eager_input_streaming`, "
    "`input_examples`, `output_schema` and `toolset_name` of a tool, and the description of a "
    "namespace.",
}
"""Reasons for what chats, Messages and Responses drop from a conversation, by name."""

MESSAGES: Mapping[str, str] = {
    "billing_header": "A line of the system prompt that begins with `x-anthropic-billing-header:` "
    "is cut out: its value changes with each request, and no prefix would be found again.",
    "cache_control": "Every prefix is cached; none has to be marked.",
    "context_management": "Nothing is taken out of a conversation.",
    "diagnostics": "There is no report of cache misses.",
    "inference_geo": "The workers are where the operator has put them.",
    "service_tier": "The tenant's class of service holds.",
    "speed": "Every answer comes as fast as it can.",
    UNBOUNDED_THOUGHT: "Where the model's `<think>` and `</think>` are no tokens of their own.",
    "thinking.display": "Reasoning is shown as it comes.",
}
"""Reasons for what only the Messages dialect drops, by name."""

RESPONSES: Mapping[str, str] = {
    "client_metadata": "What an application notes of its own session.",
    "max_tool_calls": "It counts calls of tools that a vendor runs; there are none.",
    "prompt_cache_key": "Every prefix is cached; requests go where it is.",
    "prompt_cache_options": "As `prompt_cache_key`.",
    "prompt_cache_retention": "As `prompt_cache_key`.",
    "reasoning.options": "`context` and `mode`: reasoning is shown as it comes.",
    "service_tier": "The tenant's class of service holds.",
    "store": "Nothing is stored: the answer says `store: false`.",
    "stream_options": "`include_obfuscation`: streams are not padded.",
    "text.verbosity": "Models have no levels of it.",
    "truncation": "`auto`: a conversation that is too long is refused, not cut.",
}
"""Reasons for what only the Responses dialect drops, by name."""

EMBED: Mapping[str, str] = {
    "input_type": "What a model's own prompts ask for stands in the texts.",
}
"""Reasons for what Cohere's embeddings drop, by name."""

MAX_NAMED = 32
"""Maximum names in one answer's header."""


def header_of(dropped: tuple[str, ...]) -> bytes:
    """Returns the value of the header `loraplex-dropped`."""
    return ", ".join(dropped[:MAX_NAMED]).encode()
