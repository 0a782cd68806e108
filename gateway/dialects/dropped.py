"""Lists the fields that agents send and that have no effect here. Such fields are accepted, and
named in the answer's header `loraplex-dropped`. All other unsupported fields are refused.

The API pages in docs/use have the same tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.text.chat_template import FOLDED_TURNS, HIDDEN_TURNS

EMPTY_STOP = "stop.empty"
LONE_SURROGATES = "lone_surrogates"
UNBOUNDED_THOUGHT = "thinking.budget_tokens"

WITHOUT_EFFECT = frozenset(
    (
        *("annotations", "async_", "audio", "cache_control", "caller", "citations"),
        *("extra_content", "id", "index", "metadata", "phase", "prompt_cache_breakpoint"),
        *("provider_specific_fields",),
        *("reasoning_details", "status", "thinking_blocks"),
    )
)
"""Fields without effect in messages, parts, calls, items and tools. Clients copy them from earlier
answers, or add them."""

CONVERSATIONS: Mapping[str, str] = {
    "arguments": "Arguments of a call that are not a JSON object, for example because the call was "
    "cut off. The prompt has the call without arguments.",
    "calls": "Calls without a name.",
    "content.*": "Content of a kind that is not text, such as `content.image`. A short text "
    "replaces it, such as `[image omitted]`.",
    "fields.*": "Unknown fields in history.",
    FOLDED_TURNS: "The chat template refused the turns or left out some of them. Instructions "
    "became a user's turn, turns of one role were joined, calls of one turn were separated, calls "
    "and results were written as text, or all turns were written into one.",
    HIDDEN_TURNS: "The chat template leaves out some of the turns in each form, so that the prompt "
    "lacks them.",
    "is_error": "The mark that a tool failed, because chat templates know only results.",
    "items.*": "Items that are not text, calls or results, such as `items.web_search_call`.",
    LONE_SURROGATES: "Halves of surrogate pairs, such as `\\ud83d` alone, which a client leaves "
    "when it cuts a text in the middle of a character. Each becomes U+FFFD.",
    "reasoning_items": "Reasoning that a vendor encrypted, and summaries that accompany the text "
    "of reasoning.",
    "redacted_thinking": "Encrypted reasoning, which no model here can read.",
    "tools.*": "Tools that are not functions, by their type, such as `tools.web_search`.",
    "tools.options": "`allowed_callers`, `defer_loading`, `eager_input_streaming`, "
    "`input_examples`, `output_schema` and `toolset_name` of a tool, and the description of a "
    "namespace.",
}
"""Contents that chats, Messages and Responses drop from a conversation. A key is the name in the
header `loraplex-dropped`, and its value explains what is dropped or why."""

MESSAGES: Mapping[str, str] = {
    "billing_header": "A line of the system prompt that begins with `x-anthropic-billing-header:` "
    "is cut out: its value changes with each request, and no prefix would be found again.",
    "cache_control": "Every prefix is cached, so that none has to be marked.",
    "context_management": "Nothing is removed from a conversation.",
    "diagnostics": "Cache misses are not reported.",
    "inference_geo": "The operator decides where the workers run.",
    "service_tier": "The tenant's class of service applies.",
    "speed": "Every answer is computed as fast as possible.",
    UNBOUNDED_THOUGHT: "Dropped if the model's `<think>` and `</think>` are not single tokens.",
    "thinking.display": "Reasoning is shown as it is generated.",
}
"""Contents that only the Messages dialect drops. A key is the name in the header
`loraplex-dropped`, and its value explains what is dropped or why."""

RESPONSES: Mapping[str, str] = {
    "cache_control": "Every prefix is cached, so that none has to be marked.",
    "client_metadata": "Notes of an application about its own session.",
    "max_tool_calls": "Limits calls of tools that a vendor runs, and there are none here.",
    "prompt_cache_key": "Every prefix is cached, and requests are routed to it.",
    "prompt_cache_options": "As `prompt_cache_key`.",
    "prompt_cache_retention": "As `prompt_cache_key`.",
    "reasoning.options": "`context` and `mode`, because reasoning is shown as it is generated.",
    "service_tier": "The tenant's class of service applies.",
    "store": "Nothing is stored, and the answer says `store: false`.",
    "stream_options": "`include_obfuscation`, because streams are not padded.",
    "text.verbosity": "Models have no levels of verbosity.",
    "truncation": "`auto`, because a conversation that is too long is refused and not cut.",
}
"""Fields that only the Responses dialect drops. A key is the name in the header
`loraplex-dropped`, and its value explains what is dropped or why."""

EMBED: Mapping[str, str] = {
    "input_type": "The texts contain what the model's prompts require.",
}
"""Fields that Cohere's embeddings drop. A key is the name in the header `loraplex-dropped`, and its
value is the reason."""

MAX_NAMED = 32
"""Maximum number of names in the header `loraplex-dropped` of an answer."""


def header_of(dropped: tuple[str, ...]) -> bytes:
    """Returns the value of the header `loraplex-dropped`."""
    return ", ".join(dropped[:MAX_NAMED]).encode()
