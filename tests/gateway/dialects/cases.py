"""Requests of all dialects whose answers `recorded.json.gz` has: bodies as data, and what a worker
says to them. A field is proved by the answer and by what the worker was asked, both byte by byte.

A case that is added here is recorded by `python -m tools.record_gateway`; read what it records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.gateway.scripts import Script, broken, repeat_prompt, say
from tests.hostile_grammars import DOUBLES, RULES, chain, pattern, properties, rules

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
THOUGHT = "<think>\nLook it up.\n</think>\n\n"
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
]
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "top_p": 0.9, "seed": 5},
    {"stop": "l"},
    {"stop": ["o", "never"], "include_stop_str_in_output": True},
    {"max_tokens": 2},
    {"n": 3},
    {"presence_penalty": 0.1, "frequency_penalty": -0.1, "logit_bias": {"65": -100}},
    {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2},
    {"ignore_eos": True, "min_tokens": 1, "priority": 1, "cache_salt": "x"},
    {"guided_regex": "[a-z]+"},
    {"guided_json": SCHEMA},
    {"user": "u", "metadata": {"k": "v"}, "store": False},
    {"temperature": 3},
    {"temperature": "hot"},
    {"top_p": 2},
    {"n": 0},
    {"n": 1000},
    {"stop": [""]},
    {"max_tokens": -1},
    {"max_tokens": 10**9},
    {"seed": 1.5},
    {"unknown_field": 1},
    {"guided_regex": "("},
    {"model": "nowhere"},
    {"model": 5},
    {"logit_bias": {"x": 1}},
    {"model": "support-bot@3"},
    {"model": "support-bot@staging"},
    {"model": "globex/support-bot"},
]
"""Fields of both chat and text completions."""
CHAT: list[dict[str, Any]] = [
    {"logprobs": True, "top_logprobs": 2},
    {"top_logprobs": 2},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"response_format": {"type": "xml"}},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "none"}}},
    {"tools": TOOLS, "parallel_tool_calls": False},
    {"tools": [{"type": "web_search"}]},
    {"messages": TURNS},
    {"messages": TURNS, "tools": TOOLS},
    {"messages": []},
    {"messages": None},
    {"messages": [{"role": "robot", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "user", "content": "long " * 400}]},
    {"messages": [{"role": "user", "content": "a\u0000b"}]},
    {"reasoning_effort": "low"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"thinking_budget": 1, "thinking_token_budget": 2},
    {"max_completion_tokens": 3},
    {"audio": {"voice": "x", "format": "wav"}},
    {"stream_options": {"include_usage": True}},
]
TEXT: list[dict[str, Any]] = [
    {"prompt": [72, 73]},
    {"prompt": ["a", "b"]},
    {"prompt": [[1, 2], [3]]},
    {"prompt": [999]},
    {"prompt": []},
    {"prompt": 5},
    {"echo": True},
    {"echo": True, "logprobs": 2},
    {"logprobs": 3},
    {"logprobs": 99},
    {"suffix": "x"},
    {"best_of": 2},
    {"prompt_logprobs": 1},
    {"stream_options": {"include_usage": True}},
]
MESSAGES: list[dict[str, Any]] = [
    {},
    {"system": "Be brief."},
    {"system": [{"type": "text", "text": "Be brief."}]},
    {"temperature": 0.5, "top_p": 0.9, "top_k": 3},
    {"stop_sequences": ["l"]},
    {"max_tokens": 2},
    {"max_tokens": 0},
    {"max_tokens": None},
    {"metadata": {"user_id": "u"}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
    {"tools": [{"name": "get_weather", "input_schema": SCHEMA}]},
    {
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
    {"tools": [{"name": "get_weather"}]},
    {"tool_choice": {"type": "tool", "name": "x"}},
    {"messages": []},
    {"messages": [{"role": "system", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"unknown_field": 1},
    {"model": "nowhere"},
    {"messages": [{"role": "user", "content": "long " * 400}]},
]
RESPONSES: list[dict[str, Any]] = [
    {},
    {"instructions": "Be brief."},
    {"input": [{"role": "user", "content": "Hi"}]},
    {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "H"}]}
        ]
    },
    {"input": [{"type": "item_reference", "id": "x"}]},
    {"input": []},
    {"input": 5},
    {"temperature": 0.5, "top_p": 0.9},
    {"text": {"format": {"type": "json_object"}}},
    {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    {"tools": [{"type": "function", **FUNCTION}]},
    {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    {"tools": [{"type": "web_search_preview"}]},
    {"reasoning": {"effort": "low"}},
    {"previous_response_id": "resp_x"},
    {"background": True},
    {"store": True},
    {"truncation": "auto"},
    {"max_output_tokens": 2},
    {"max_output_tokens": 0},
    {"unknown_field": 1},
    {"model": "nowhere"},
]
OTHERS: list[tuple[str, Any]] = [
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/embeddings", {"input": [1, 2]}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": "a", "dimensions": 4}),
    ("/v1/embeddings", {"input": ""}),
    ("/v1/embeddings", {"input": []}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "xml"}),
    ("/v2/embed", {"texts": ["a"], "input_type": "search_query"}),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/v1/score", {"text_1": "a"}),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 1, "return_documents": True}),
    ("/v1/rerank", {"query": "a", "documents": []}),
    ("/v2/rerank", {"query": "a", "documents": ["b"]}),
    ("/v1/classify", {"input": "a"}),
    ("/classify", {"input": ["a", "b"]}),
    ("/tokenize", {"prompt": "Hi"}),
    ("/tokenize", {"messages": HI}),
    ("/tokenize", {"messages": HI, "add_generation_prompt": False, "return_token_strs": True}),
    ("/tokenize", {"prompt": 5}),
    ("/detokenize", {"tokens": [39, 72]}),
    ("/detokenize", {"tokens": [9999]}),
    ("/detokenize", {"tokens": "x"}),
    ("/v1/messages/count_tokens", {"messages": HI}),
    ("/v1/messages/count_tokens", {"messages": []}),
    *[(f"/v1/{route}", {}) for route in ("chat/completions", "completions", "messages")],
    *[(f"/v1/{route}", {}) for route in ("responses", "embeddings", "score", "rerank")],
]
GETS = (
    *("/v1/models", "/v1/models/tiny", "/v1/models/support-bot", "/v1/models/support-bot@3"),
    *("/v1/models/nowhere", "/livez", "/readyz", "/health", "/v1", "/v1/chat/completion"),
    *("/", "/v1//models", "/v1/chat/completions", "/ping", "/version"),
)
"""Routes that are requested with GET. The OpenAPI document is compared as an object."""
RAW = (
    *(b"", b"{", b"[]", b"null", b'"text"', b"\xff", b'{"model": "tiny", "messages": "\xff"}'),
    *(b"[" * 70000, b'{"a":' * 70000, b'{"model": "tiny", "messages": ' + b"[" * 70000),
    b'{"model": "tiny", "messages": ' + b"[" * 70000 + b"]" * 70000 + b"}",
)
"""Bodies that are no request."""
HEADERS: list[dict[str, str]] = [
    {"authorization": ""},
    {"authorization": "Bearer nothing"},
    {"authorization": "Basic x"},
    {"x-request-timeout": "0"},
    {"x-request-timeout": "soon"},
    {"origin": "https://app.example.com"},
    {"content-encoding": "gzip"},
]
SCRIPTS: dict[str, Script] = {
    "thought": say(THOUGHT + "Rain.", per_step=1000),
    "call": say(CALL, per_step=1000, cached=3),
    "no text": say("", per_step=1000),
    "signs": say("Grüße, 世界 🏴 </p>\n", per_step=1000),
}

PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HI, "max_tokens": 20}),
    "text": ("/v1/completions", {"prompt": "Hi", "max_tokens": 20}),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 20}),
    "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": 20}),
    "embeddings": ("/v1/embeddings", {"input": "a"}),
    "embed": ("/v2/embed", {"texts": ["Where is it?", "It is late."]}),
    "score": ("/v1/score", {"text_1": "q", "text_2": ["aa", "b"]}),
    "rerank": ("/v1/rerank", {"query": "q", "documents": ["ccc", "a", "bb"]}),
    "tokenize": ("/tokenize", {"prompt": "Hi é"}),
    "detokenize": ("/detokenize", {"tokens": [39, 72]}),
}
"""The path of each dialect, and the fields that a body has unless a case says otherwise."""


def named(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def nested(depth: int, key: str = "a") -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {key: value}
    return value


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    inner = {"name": "x", "schema": schema, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


SAMPLED: dict[str, Any] = {
    "model": "acme/support-bot@staging",
    "temperature": 0.5,
    "top_p": 0.9,
    "presence_penalty": 0.1,
    "frequency_penalty": -0.1,
    "logit_bias": {"65": -100},
    "seed": -3,
    "user": "u",
    "metadata": {"k": "v"},
    "top_k": 7,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "ignore_eos": True,
    "min_tokens": 2,
    "stop_token_ids": [10],
    "priority": 3,
    "cache_salt": "pepper",
}
NOTHING: dict[str, list[Any]] = {
    "frequency_penalty": [0],
    "function_call": ["none", "auto"],
    "functions": [[]],
    "logit_bias": [{}],
    "metadata": [{}],
    "modalities": [["text"]],
    "n": [1],
    "parallel_tool_calls": [True, False],
    "presence_penalty": [0],
    "prompt_cache_retention": ["in_memory", "24h"],
    "reasoning_effort": ["none"],
    "response_format": [{"type": "text"}],
    "service_tier": ["auto", "default", "flex"],
    "stop": [[]],
    "store": [False, True],
    "tool_choice": ["none", "auto"],
    "tools": [[]],
    "top_logprobs": [0],
    "verbosity": ["medium", "low"],
    "best_of": [1],
    "suffix": [""],
    "echo": [False],
    "allowed_token_ids": [[]],
    "bad_words": [[]],
    "thinking_token_budget": [-1],
    "use_beam_search": [False],
    "length_penalty": [1.0],
    "spaces_between_special_tokens": [True],
    "skip_special_tokens": [True],
    "include_reasoning": [True],
    "prediction": [{"type": "content", "content": "x"}],
    "prompt_cache_options": [{"mode": "implicit"}],
    "audio": [{"voice": "a", "format": "wav"}],
    "moderation": [{"model": "m"}],
    "web_search_options": [{}],
}
"""Values that ask for nothing, wishes that are dropped by name, and what is refused by name."""
UNENFORCED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "path": {"type": "string", "format": "file-path"},
        "kept": {"const": 77},
    },
}
CLOSED = {"disable_additional_properties": True}
CONSTRAINED: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object", "schema": None}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "grammar"}},
    {"guided_json": '{"enum": [77]}'},
    {"guided_choice": ["red", 'gr"een']},
    {"guided_choice": [""]},
    {"guided_grammar": 'start: "x"'},
    {"guided_grammar": "start: missing"},
    {"guided_regex": "(?<=x)a"},
    {"guided_regex": "a", "guided_choice": ["b"]},
    {"structured_outputs": {"regex": "[a-f]"}},
    {"structured_outputs": {"choice": ["red"]}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), **CLOSED}},
    {"guided_json": SCHEMA, "structured_outputs": CLOSED},
    schema_format(SCHEMA, strict=True),
    {**schema_format(SCHEMA), "structured_outputs": {"disable_additional_properties": False}},
    schema_format(UNENFORCED),
    schema_format(UNENFORCED, strict=False),
    schema_format({"properties": {"a": {"type": "string", "format": "phone"}}}, strict=True),
    schema_format({"not": {"type": "null"}}, strict=True),
    schema_format({"uniqueItems": True}, strict=True),
    {"response_format": {"type": "json_object", "schema": UNENFORCED}},
    {"guided_json": UNENFORCED},
    {"structured_outputs": {"json": UNENFORCED}},
    {"guided_json": {"oneOf": [{"type": "object"}, {}]}},
    {"guided_json": {"$ref": "http://x/y"}},
    {"guided_json": "{"},
    {"guided_json": nested(70, "items")},
    {"guided_json": '{"a":' * 5000 + "0" + "}" * 5000},
    {"guided_json": {"enum": ["x" * 300_000]}},
    {"guided_json": chain("%s", 2_500)},
    {"guided_json": chain(DOUBLES["allOf"], 30, pattern("a"))},
    {"guided_json": properties(8_000)},
    {"guided_json": pattern("a?" * 8_000)},
    {"guided_regex": "a?" * 20_000},
    {"structured_outputs": {"regex": "a?" * 20_000}},
    {"guided_grammar": rules(RULES["rules"], 2_700)},
]
VLLM: list[dict[str, Any]] = [
    {"allowed_token_ids": [3, 1], "bad_words": ["  ab", "c"], "n": 2},
    {"allowed_token_ids": [1 << 20]},
    {"allowed_token_ids": [1], "guided_regex": "a"},
    {"allowed_token_ids": [1] * 4097},
    {"bad_words": ["x"] * 257},
    {"bad_words": [f"{n:0256}" for n in range(17)]},
    {"bad_words": [""]},
    {"truncate_prompt_tokens": 0},
    {"truncate_prompt_tokens": 3},
    {"truncate_prompt_tokens": 3, "truncation_side": "right"},
    {"truncate_prompt_tokens": -1, "max_tokens": 4096},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 2, "n": 2},
    {"logprob_token_ids": [1]},
    {"min_tokens": 21},
    {"max_tokens": 4096},
    {"max_tokens": 64_000},
]
EMPTY: dict[str, Any] = dict.fromkeys(
    ("stop", "user", "seed", "temperature", "tools", "metadata", "logit_bias")
)
WRONG: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"logit_bais": {"5": 1}},
        {"chat_template": "{{ 1 }}"},
        {"use_beam_search": True},
        {"best_of": 2},
        {"service_tier": "gold"},
        {"temperature": -1},
        {"temperature": "1", "modalities": ["text"]},
        {"top_p": -0.1},
        {"top_logprobs": 21, "logprobs": True},
        {"n": 16384},
        {"stop": ["a"] * 65},
        {"stop": "a" * 257},
        *[{name: value} for name in ("max_tokens", "temperature", "stream", "user")
          for value in ({}, [])],
        {"stream_options": {"include_usage": []}, "stream": True},
        {"seed": 1 << 63},
        {"max_tokens": 0},
        *[{"logit_bias": {"1": 1} | wrong, **more}
          for wrong in ({"320": 1}, {"2": 101}, {"abc": 1}, {"2": None}, {"-3": 1})
          for more in ({}, {"tools": None})],
        {"logit_bias": {"5": 1}, "frobnicate": None},
        {"stop_token_ids": [1, 999]},
        {"metadata": {"a": "b", "c": 1}},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        *[{"model": name} for name in (
            "nonsense", "secret", "globex/secret", "acme/tiny", "support-bot@nonsense",
            "support-bot@8", "support-bot@", "support-bot@07x", "support-bot@" + "9" * 20,
            "/support-bot", "acme/acme/support-bot", "tiny@prod", "@7", "../../etc/passwd",
            "z" * 10_000)],
    ],
    "text": [
        {"logprobs": 21},
        {"max_tokens": 0},
        {"prompt": ""},
        {"prompt": [[]]},
        {"prompt": ["a", 1]},
        {"prompt": [320]},
        {"prompt": [-1]},
        {"prompt": ["a"] * 129},
        {"prompt": ["a"] * 65, "n": 2},
    ],
}  # fmt: skip
"""Values and models that are refused, most by the name of a field."""
WHOLE: dict[str, list[dict[str, Any]]] = {
    "chat": [
        *WRONG["chat"],
        SAMPLED | {"max_completion_tokens": 9},
        *[{name: value} for name, values in NOTHING.items() for value in values],
        EMPTY,
        *CONSTRAINED,
        *VLLM,
        {"max_completion_tokens": 3, "min_tokens": 4},
        {"max_tokens": 4096, "max_completion_tokens": 4096},
        {"top_logprobs": -1, "logprobs": True, "max_tokens": 410},
        {"logprobs": True, "logprob_token_ids": [260, 7], "return_tokens_as_token_ids": True},
        {"logprobs": True, "logprob_token_ids": [320]},
        {"logprobs": True, "logprob_token_ids": [1] * 129},
        {"logprobs": True, "top_logprobs": -2},
        {"thinking_token_budget": 5},
        *[{"tools": [named(f"f{number}") for number in range(257)]}],
        {"tools": [named("f"), named("f")]},
        {"tools": [named("a b")]},
        {"tools": [named("f", returns="x")]},
        {"tools": [{"type": "function"}]},
        {"tools": [named("f", parameters=nested(70))]},
        {"tools": [named("f", description="x" * (256 << 10))]},
        {"tools": [named("f", strict=True, parameters={"type": "object", "not": {}})]},
        {"tools": [named("f", strict=True, parameters=UNENFORCED)]},
        {"tools": [named("f", parameters=UNENFORCED)]},
        {"tools": [named("f", parameters=UNENFORCED)], "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tool_choice": "none", "parallel_tool_calls": False},
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": "any"},
        *[
            {"tools": [*TOOLS, named("get_time")], "tool_choice": allowed}
            for mode in ("auto", "required")
            for offered in (
                [named("get_time")],
                [named("get_time"), {"type": "web_search"}],
                [named("get_tide")],
                [{"type": "web_search"}],
                [{"type": "function"}],
            )
            for allowed in [
                {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": offered}}
            ]
        ],
        {"reasoning_effort": "huge"},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {}, "add_generation_prompt": True},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"a": nested(70)}},
        {"chat_template_kwargs": {"a": "x" * (64 << 10)}},
        {"add_generation_prompt": False},
        {"continue_final_message": True, "add_generation_prompt": True},
        {"messages": [*HI, {"role": "assistant", "content": "Well, "}],
         "continue_final_message": True, "echo": True},
        {"messages": HI, "echo": True},
        {"messages": [{"role": "critic", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": "", "tool_calls": TURNS[2]["tool_calls"]}]},
        {"messages": [{"role": "system", "content": 7}, *HI]},
        {"messages": [{"role": "developer", "content": "be kind"}, *HI]},
    ],
    "text": [
        SAMPLED,
        *WRONG["text"],
        *[{name: value} for name, values in NOTHING.items() for value in values],
        EMPTY,
        *CONSTRAINED,
        *VLLM,
        {"max_tokens": None},
        {"prompt": [{"image": "data:,"}]},
        {"best_of": 3, "n": 2},
        {"prompt_logprobs": 1, "stream": True},
        {"prompt_logprobs": 20, "prompt": ["x" * 100] * 128},
        {"prompt_logprobs": 2, "n": 2, "echo": True, "logprobs": 1, "prompt": "ab"},
        {"prompt": "x" * 4105},
        {"prompt": "x" * 4105, "truncate_prompt_tokens": -1},
        {"prompt": [72] * 9, "truncate_prompt_tokens": 5, "echo": True},
        {"prompt": [[65] * 4096], "max_tokens": 1},
        {"prompt": ["a", "bcd"], "max_tokens": 4094},
        {"logprobs": -1},
        {"logprobs": 0, "logprob_token_ids": [260, 7], "return_tokens_as_token_ids": True},
        {"echo": True, "logprobs": 0, "max_tokens": 0, "prompt": [51, 67, 78]},
        {"echo": True, "max_tokens": 0},
        {"echo": True, "stop": "STOP", "prompt": "Hello STOP"},
    ],
    "messages": [
        {"model": "acme/support-bot@staging", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9,
         "top_k": 7, "metadata": {"user_id": "u"},
         "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"n": 2},
        {"mcp_servers": [{}]},
        {"temperature": 3},
        {"stop_sequences": ["s"] * 65},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]},
        {"messages": [*HI, {"role": "assistant", "content": "The best is ("}]},
        {"messages": [*HI, {"role": "user", "content": [{"type": "text", "text": "b"},
                                                        {"type": "text", "text": "c"}]}]},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        *[{"system": f"x-anthropic-billing-header: cc_version=2.1.3; cch={check};\n\nYou code."}
          for check in ("00ab1", "77fe3")],
        {"max_tokens": 4096},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"tools": [{"name": "get_weather", "input_schema": SCHEMA}],
         "tool_choice": {"type": "tool", "name": "get_weather"}},
        {"tools": [{"name": "get_weather", "input_schema": SCHEMA}],
         "tool_choice": {"type": "auto"}},
        {"tools": [{"name": "get_weather", "input_schema": SCHEMA}],
         "tool_choice": {"type": "none"}},
        {
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00ab1;"},
                {"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a",
                                              "cache_control": {"type": "ephemeral"}}]},
                {"role": "system", "content": "Mind."},
                {"role": "user", "content": "b"},
            ],
            "metadata": {"user_id": json.dumps({"device": "d", "session": "s"})},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
            "service_tier": "auto",
        },
    ],
    "responses": [
        {"metadata": {"k": "v"}, "temperature": 0.5, "top_p": 0.9, "store": False},
        {"frequency_penalty": 0.5, "max_tool_calls": 3, "presence_penalty": -1, "user": "u",
         "prompt_cache_key": "key", "safety_identifier": "user-7", "service_tier": "flex",
         "tool_choice": "none", "store": True, "tools": [
            {"type": "function", "name": "f", "cache_control": {"type": "ephemeral"}},
            {"type": "function", "name": "g", "description": "G", "parameters": {},
             "strict": False},
            {"type": "namespace", "name": "files",
             "tools": [{"type": "function", "name": "read"}]},
            {"type": "web_search"}]},
        {"stop": "l", "top_k": 7, "min_p": 0.1, "presence_penalty": 0.5, "seed": 3,
         "logit_bias": {"5": -1}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"enable_thinking": True}, "reasoning": {"effort": "none"}},
        *[{"tools": [{"type": "function", "name": "f"}], "tool_choice": choice} for choice in (
            {"type": "function", "name": "f"},
            {"type": "allowed_tools", "mode": "auto",
             "tools": [{"type": "function", "name": "f"}]})],
        {"model": None},
        {"input": [{"role": "narrator", "content": "x"}]},
        {"conversation": "c"},
        {"include": ["file_search_call.results"]},
        {"n": 2},
        {"stop": ["s"] * 65},
        {"top_logprobs": 21},
        {"min_tokens": 65},
        {"max_tool_calls": 0},
        {"max_output_tokens": 4096},
        {"input": [{"type": "reasoning", "id": "r", "encrypted_content": "loraplex:!"}]},
        {"input": [{"type": "web_search_call", "id": "w", "status": "completed"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"tools": [{"type": "function", "name": 7}]},
        {"tools": [{"type": "teleport"}], "tool_choice": "required"},
        *[
            {"tools": [{"type": "function", **FUNCTION}, {"type": "function", "name": "get_time"}],
             "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": offered}}
            for offered in ([{"type": "function", "name": "get_time"}],
                            [{"type": "function", "name": "get_tide"}],
                            [{"type": "function", "name": "get_time"},
                             {"type": "web_search"}],
                            [{"type": "function"}],
                            [{"type": "function", "name": 7}],
                            [{"type": "function", "name": "get_time", "namespace": 7}],
                            [{"type": "web_search"}])
        ],
        {
            "instructions": "You code.",
            "input": [
                {"type": "message", "role": "developer", "content": "Mind."},
                {"type": "message", "role": "user",
                 "content": [{"type": "input_text", "text": "Hi"}]},
            ],
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "medium", "summary": "auto"},
            "text": {"verbosity": "low"},
            "tools": [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}],
            "parallel_tool_calls": False,
        },
    ],
    "embeddings": [
        *[{"input": given, "user": "u", "encoding_format": form}
          for given in ("Once", ["one", "two"], [1, 2, 3], [[1, 2], [3]])
          for form in ("float", "base64")],
        {"input": [""]},
        {"input": ["a", [1]]},
        {"input": [{"image": "data:,"}]},
        {"input": [[1]] * 2049},
        {"input": [[1] * 20_000] * 14},
        {"input": [[9999]]},
        {"input": [-1]},
        {"input": [[1, 100_000]]},
        {"dimensions": 65},
        {"dimensions": 0},
        {"encoding_format": "int8"},
        {"stream": True},
        {"input": "a" * 4097},
        {"input": None},
        {"input": None, "messages": HI},
        {"messages": HI},
        {"input": ["Hello", "x" * 4105], "truncate_prompt_tokens": 4},
        {"input": "Hello", "truncate_prompt_tokens": 4, "truncation_side": "left"},
    ],
    "embed": [
        {"embedding_types": ["float", "int8", "uint8", "binary", "ubinary", "base64"]},
        {"output_dimension": 5},
        {"output_dimension": 5, "embedding_types": ["ubinary"]},
        {"texts": None, "inputs": [{"content": [{"type": "text", "text": "one"},
                                                {"type": "text", "text": "two"}]}]},
        *[{"texts": ["a" * 4096 + "b" * 9], **cut} for cut in (
            {}, {"truncate": "END"}, {"truncate": "START"}, {"max_tokens": 3},
            {"max_tokens": 3, "truncate": "START"}, {"truncate": "NONE"})],
        {"texts": None},
        {"inputs": [{"content": ["a"]}]},
        {"inputs": [{"content": [{"type": "text", "text": "one"}]}]},
        {"texts": []},
        {"texts": [""]},
        {"texts": ["a"] * 2049},
        {"texts": None, "images": ["data:image/png;base64,"]},
        {"texts": None, "inputs": [
            {"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        {"input_type": "image"},
        {"input_type": "search_document"},
        {"embedding_types": ["int4"]},
        {"output_dimension": 65},
        {"truncate": "MIDDLE"},
        {"truncate": "NONE", "max_tokens": 3},
        {"fusion": 1},
    ],
    "score": [
        {"text_2": "aa"},
        {"text_1": None, "text_2": None, "queries": "q", "documents": ["a", "b"]},
        {"text_2": [{"image": "data:,"}]},
        {"text_1": ["q"]},
        {"text_1": ["q", "r"]},
        {"instruction": "Match rhymes"},
        {"text_1": ["a", "b"], "text_2": ["a"]},
        {"text_2": []},
        {"text_2": ["b" * 1500] * 200},
    ],
    "rerank": [
        {"documents": [{"text": "ccc"}, {"text": "a"}], "top_n": 1, "return_documents": False},
        {"documents": ["a"] * 2049},
        {"top_n": 0},
        {"documents": [{"image": "a"}]},
        {"max_chunks_per_doc": 2},
        {"query": None},
        {"documents": ["a" * 4096]},
        {"max_tokens_per_doc": 2},
    ],
    "tokenize": [
        {},
        {"return_token_strs": True},
        {"messages": TURNS, "tools": TOOLS, "prompt": None},
        {"messages": [*HI, {"role": "assistant", "content": "He"}], "prompt": None,
         "continue_final_message": True},
        {"messages": HI},
        {"prompt": None},
        {"messages": HI, "prompt": None, "continue_final_message": True,
         "add_generation_prompt": True},
        {"chat_template": "{{ messages }}"},
    ],
}  # fmt: skip
"""Bodies that are sent once, without a stream."""

BOTH = f"{THOUGHT}One moment.\n{CALL}"
TOOLED: dict[str, dict[str, Any]] = {
    "chat": {"tools": TOOLS, "max_tokens": 400},
    "messages": {"tools": [{"name": "get_weather", "input_schema": SCHEMA}], "max_tokens": 400},
    "responses": {"tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 400},
}
STOPS = {"chat": "stop", "text": "stop", "messages": "stop_sequences", "responses": "stop"}
LENGTHS = {"chat": "max_tokens", "text": "max_tokens", "messages": "max_tokens",
           "responses": "max_output_tokens"}  # fmt: skip
FORCED: dict[str, Any] = {"chat": "required", "messages": {"type": "any"}, "responses": "required"}


def stopped(*stops: str, **fields: Any) -> dict[str, list[dict[str, Any]]]:
    """Returns a body with these stop strings in each dialect."""
    return {dialect: [{name: list(stops), **fields}] for dialect, name in STOPS.items()}


def cut(*lengths: int, **fields: Any) -> dict[str, list[dict[str, Any]]]:
    """Returns a body with each of these lengths in each dialect."""
    return {
        dialect: [{name: length, **fields} for length in lengths]
        for dialect, name in LENGTHS.items()
    }


def tooled(*more: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {dialect: [body | each for each in more or ({},)] for dialect, body in TOOLED.items()}


IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
SCORED: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "logprob_token_ids": [260, 7], **IDS},
        {"logprobs": True, "top_logprobs": -1, "max_tokens": 2},
    ],
    "text": [
        *[{"logprobs": number, "echo": echo} for number in (0, 2) for echo in (False, True)],
        {"logprobs": 0, "logprob_token_ids": [260, 7], **IDS},
    ],
    "responses": [{"include": ["message.output_text.logprobs"], "top_logprobs": 2}],
}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
SAID: list[tuple[str, Script, dict[str, list[dict[str, Any]]]]] = [
    *[(f"{name} in pieces of {size}", say(text, per_step=size), bodies)
      for size in (1, 3)
      for name, text, bodies in (
        ("a stop", "one STILL two STOP three", stopped("never", "STOP")),
        ("signs", "a€ 🏴", SCORED),
        ("thought, text and call", BOTH, tooled()),
        ("stops of a call", BOTH,
         {d: [TOOLED[d] | {STOPS[d]: ["}", "city", "<tool_call>", "up.", "\n"]}] for d in TOOLED}),
        ("two calls", f"{CALL}\n{CALL.replace('Bern', 'Rome')}", tooled({})),
      )],
    ("no stop", say("wait, ST"), stopped("STOP")),
    ("shown stop", say("one STOP two", per_step=2),
     stopped("STOP", include_stop_str_in_output=True)),
    ("early stop", say("x.y.z."), {d: stopped(".", min_tokens=3)[d] for d in ("chat", "text")}),
    ("half a sign", say("a🏴"), cut(3, 2)),
    ("cut call", say(f"One moment.{CALL}", per_step=5),
     {d: [TOOLED[d] | {LENGTHS[d]: length} for length in (17, 22, 33, len(CALL) - 7)]
      for d in TOOLED}),
    ("forced call", say(THOUGHT + CALL, per_step=9),
     {d: [TOOLED[d] | {"tool_choice": FORCED[d]},
          TOOLED[d] | {"tool_choice": FORCED[d], LENGTHS[d]: len(THOUGHT) + 3}] for d in TOOLED}),
    ("one call", say(f"{CALL}\n{CALL}", per_step=1000), {
        "chat": [TOOLED["chat"] | {"parallel_tool_calls": False}]}),
    ("call without tools", say(CALL, per_step=1000), {
        "chat": [{"max_tokens": 400}, TOOLED["chat"] | {"tool_choice": "none"}]}),
    ("schema", say('{"city": "Bern"}', per_step=4), {
        "chat": [schema_format(SCHEMA)],
        "messages": [{"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}],
        "responses": [{"text": {"format": {"type": "json_schema", "name": "a",
                                           "schema": SCHEMA}}}]}),
    ("summaries", say(f"{THOUGHT}One.", per_step=4), {"responses": [
        {"reasoning": how, "max_output_tokens": 90}
        for how in (None, {"summary": "auto"}, {"generate_summary": "concise"},
                    {"summary": "none"})]}),
    ("carried thought", say(f"{THOUGHT}One.", per_step=1000), {"responses": [
        {"include": ["reasoning.encrypted_content"], "max_output_tokens": 90}]}),
    ("scores of a call", say(THOUGHT + CALL, per_step=4), {
        "chat": [TOOLED["chat"] | {"logprobs": True, **IDS}],
        "text": [{"logprobs": 1, "max_tokens": 200, **IDS}],
        "responses": [TOOLED["responses"] | SCORED["responses"][0]]}),
    ("ids to a stop", say("Grüße STOP more", per_step=3), {
        "chat": [{"stop": "OP", "max_tokens": 40, **IDS}],
        "text": [{"stop": "OP", "max_tokens": 40, **IDS}]}),
    ("stop tokens", say("one two"), {
        d: [{"stop": [" t", "wo"]}, {"stop_token_ids": [257]}, {}] for d in ("chat", "text")}),
    ("use so far", say(f"{THOUGHT}abc", cached=8), {
        d: [{"stream": True, "stream_options": USAGE, "max_tokens": 90}]
        for d in ("chat", "text")}),
    ("begun thought", say(" twice. stop\n</think>\n\nTwice. stop it", per_step=5), {"chat": [
        {"messages": [*HI, {"role": "assistant", **begun}], "stop": [" stop"], "max_tokens": 90,
         "continue_final_message": True, "add_generation_prompt": False, "echo": echo}
        for echo in (False, True)
        for begun in ({"content": "<think>\nLate"}, {"content": "", "reasoning_content": "Late"},
                      {"content": "<think>\na\n</think>\n\nOn which"})]}),
    ("prompts", repeat_prompt, {
        "chat": [{"n": 3, "max_tokens": 90}],
        "text": [{"prompt": prompt, "n": 2, **scores}
                 for prompt in ("ab", ["one", "two"], [[78, 77], [83]])
                 for scores in ({}, {"echo": True, "logprobs": 1},
                                {"echo": True, "logprobs": 1, "max_tokens": 0},
                                {"echo": True, "max_tokens": 0})]}),
    ("a break", broken, {dialect: [{}] for dialect in STOPS}),
    ("two thoughts", say(f"{THOUGHT}One.", per_step=1000), {"chat": [
        {"n": 2, "max_tokens": 90}]}),
]  # fmt: skip
"""What a worker says, and the bodies that it says it to, whole and streamed."""

PNG = "data:image/png;base64,iVBORw0KGgo="
ASKED: dict[str, Any] = {"role": "user", "content": "And now?"}
DONE: dict[str, Any] = {"role": "assistant", "content": "Done."}
TEXT_KIND = {"chat": "text", "messages": "text", "responses": "input_text"}
PARTS: dict[str, list[Any]] = {
    "chat": [
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "file", "file": {"file_data": "JVBERi0=", "filename": "a.pdf"}},
        {"type": "hologram", "data": "iVBORw0KGgo="},
    ],
    "messages": [
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
        },
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
        },
        {"type": "hologram", "data": "iVBORw0KGgo="},
    ],
    "responses": [
        {"type": "input_image", "image_url": PNG, "detail": "high"},
        {"type": "input_file", "file_data": "JVBERi0=", "filename": "a.pdf"},
        {"type": "hologram", "data": "iVBORw0KGgo="},
    ],
}
"""A picture, a file and a part of no known kind, which no model reads."""
OTHER_TOOLS: dict[str, list[Any]] = {
    "chat": [
        {"type": "custom", "custom": {"name": "patch"}},
        {"type": "mcp", "server_url": "x"},
        {"type": "teleport"},
    ],
    "messages": [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        {"type": "teleport", "name": "t"},
    ],
    "responses": [
        {"type": "custom", "name": "patch"},
        {"type": "mcp", "server_label": "x"},
        {"type": "teleport"},
    ],
}


def called(dialect: str, arguments: Any, content: Any = "done") -> list[Any]:
    """Returns a call with these arguments, and its result."""
    function = {"name": "run", "arguments": arguments}
    use = {"type": "tool_use", "id": "c", "name": "run", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "c", "content": content}
    return {
        "chat": [
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c", "content": content},
        ],
        "messages": [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
        "responses": [
            {"type": "function_call", "call_id": "c", **function},
            {"type": "function_call_output", "call_id": "c", "output": content},
        ],
    }[dialect]


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "id": f"{kind}_1", "status": "completed", **fields}


def same_turns(dialect: str) -> Iterator[list[Any]]:
    """Yields conversations that each dialect can say."""
    for arguments in (
        *('{"text": "he said ', "null", "[1]", '"text"', "7", "no JSON", [1, 2], 7, "", "  "),
        *('{"a": ' * 200 + "1" + "}" * 200, None, {}, '{"city": "Bern"}', {"city": "Bern"}),
    ):
        yield [ASKED, *called(dialect, arguments)]
    text = {"type": TEXT_KIND[dialect], "text": "See:"}
    yield [ASKED, *called(dialect, "{}", [text, *PARTS[dialect], "bare", {"temperature": 3}])]
    for part in PARTS[dialect]:
        shown = {"role": "user", "content": [text, part]}
        yield [shown]
        yield [ASKED, DONE, shown]
        yield [shown, DONE, ASKED]
        yield [ASKED, *called(dialect, "{}"), shown]
        yield [shown, *called(dialect, "{}")]
    marked = {**text, "cache_control": {"type": "ephemeral"}}
    yield [{"role": "user", "content": [marked]}]
    yield [{**ASKED, "frobnicate": 1}]
    yield [{"role": "user", "content": [{**marked, "frobnicate": 1}]}]
    yield [{**ASKED, "frobnicate": 1}, {**DONE, "zz": 1}, ASKED]
    empty = {name: list[Any]() for name in ("async_", "toolset_name", "zz")}
    call, result = called(dialect, '{"city": "Bern"}')
    yield [{**ASKED, **empty}, {**call, **empty}, {**result, **empty}, {**ASKED, **empty}]


TURNS_OF: dict[str, list[list[Any]]] = {
    "chat": [
        [
            {"role": "user", "content": "a", "tool_calls": [{"id": "x"}], "tool_call_id": "y"},
            {"role": "assistant", "content": None, "refusal": "I may not."},
            {"role": "assistant", "content": None, "audio": {"id": "audio_1"}},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
                    {"type": "text", "text": "So."},
                ],
                "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
                "thinking_blocks": [{"type": "thinking", "thinking": "Hm."}],
            },
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "old"},
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}, 7]},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "p", "type": "custom", "custom": {"name": "patch", "input": "***"}}
                ],
            },
            {"role": "tool", "content": {"temperature": 3}},
            {"role": "assistant", "content": 7},
        ],
        [{"role": "assistant", "content": [{"type": "text", "text": ""}] * 4097}],
        [{"role": "assistant", "tool_calls": called("chat", "{}")[0]["tool_calls"] * 257}],
        [{"role": "assistant", "tool_calls": [{"id": "c" * 257, "function": {"name": "f"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f" * 129}}]}],
        [{"role": "tool", "tool_call_id": "c" * 257, "content": ""}],
    ],
    "messages": [
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Search.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
                    {
                        "type": "web_search_tool_result",
                        "tool_use_id": "s1",
                        "content": [{"type": "web_search_result", "encrypted_content": "zzz"}],
                    },
                    {"type": "mcp_tool_use", "id": "m1", "name": "find", "server_name": "x"},
                    {
                        "type": "mcp_tool_result",
                        "tool_use_id": "m1",
                        "content": [{"type": "text", "text": "in Bern"}],
                    },
                    {"type": "container_upload", "file_id": "f"},
                    {"type": "text", "text": "It rains.", "citations": [{"type": "page"}]},
                    {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "tool_reference", "tool_name": "WebSearch"}],
                    }
                ],
            },
        ],
        [
            {
                "role": "user",
                "content": [
                    {"type": "document", "source": {"type": "text", "data": "Plain."}},
                    {
                        "type": "search_result",
                        "source": "s",
                        "title": "t",
                        "content": [{"type": "text", "text": "Found."}],
                    },
                    {"type": "text", "text": "And?"},
                ],
            }
        ],
        [called("messages", {})[0] | {"content": [{"type": "tool_use", "name": "f" * 129}]}],
        [{"role": "assistant", "content": [{"type": "text", "text": ""}] * 4097}],
        called("messages", {}, [{"type": "search_result", "content": nested(400, "content")}]),
    ],
    "responses": [
        [
            item("custom_tool_call", call_id="c", name="patch", input="*** Begin"),
            item("custom_tool_call_output", call_id="c", output="Done"),
        ],
        [
            item("local_shell_call", call_id="c", action={"type": "exec", "command": ["ls"]}),
            {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
        ],
        [
            item("shell_call", call_id="c", action={"commands": ["ls"]}),
            item("shell_call_output", call_id="c", output=[{"stdout": "a", "stderr": ""}]),
        ],
        [
            item("apply_patch_call", call_id="c", operation={"type": "delete_file"}),
            {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
        ],
        *[
            [item("mcp_call", name="find", server_label="x", arguments="{}", **end)]
            for end in ({"output": "in Bern"}, {"error": "away"})
        ],
        [
            item("computer_call", call_id="c", action={"type": "screenshot"}),
            item("computer_call_output", call_id="c", output={"type": "shot", "image_url": PNG}),
        ],
        [
            item("web_search_call", action={"type": "search", "query": "q"}),
            item("file_search_call", queries=["q"]),
            item("image_generation_call", result="iVBOR"),
            item("mcp_list_tools", tools=[{"name": "f"}]),
            item("mcp_approval_request", name="f", arguments="{}"),
            item("compaction", encrypted_content="zzz"),
            item("code_interpreter_call", code="1"),
            item("hologram"),
            item("reasoning", encrypted_content="loraplex:!"),
            item("agent_message", role="assistant", content=[{"type": "text", "text": "Hm."}]),
        ],
        [{"type": "teleport_call", "call_id": "c", "arguments": "{}"}],
        [
            item("message", role="assistant", phase="final_answer",
                 content=[{"type": "refusal", "refusal": "I may not."}]),
            item("function_call", call_id="c", name="f", arguments="{}") | {"status": "failed"},
        ],
        [
            {"type": "reasoning", "summary": [],
             "content": [{"type": "reasoning_text", "text": text}]}
            for text in ("First.", "Then.")
        ] + [{"type": "message", "role": "assistant", "content": text} for text in ("A", "B")],
        [
            {"type": "additional_tools", "role": "developer", "tools": [
                {"type": "function", "name": "later", "description": "Later."}] * 2
                + [{"type": "x"}]},
            ASKED,
            item("tool_search_call", call_id="c", arguments={"query": "find"}),
            item("tool_search_output", call_id="c", tools=[
                {"type": "namespace", "name": "mcp__x",
                 "tools": [{"type": "function", "name": "find"}]},
                {"type": "function", "name": "a b"}]),
        ],
        [{"type": "function_call", "call_id": "c" * 257, "name": "f"}],
        [{"type": "function_call_output", "call_id": "c", "output": [{}] * 4097}],
        [{"type": "teleport_call", "call_id": "c", "name": "f" * 129, "action": {}}],
    ],
}  # fmt: skip
"""Turns of one dialect alone, before a new message."""


def histories() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields dialect and body of each conversation whose history is read."""
    for dialect in TOOLED:
        field = "input" if dialect == "responses" else "messages"
        for turns in same_turns(dialect):
            yield dialect, {field: turns}
        for turns in TURNS_OF[dialect]:
            yield dialect, {field: [ASKED, *turns, ASKED]}
        others = {"tools": OTHER_TOOLS[dialect]}
        yield dialect, others
        yield dialect, others | {"tool_choice": FORCED[dialect]}
        yield dialect, {"tools": [*OTHER_TOOLS[dialect], *TOOLED[dialect]["tools"]]}
        marked = {"cache_control": {"a": 1}, "metadata": {"a": 1}, "defer_loading": True}
        for more in (marked, {"frobnicate": 1}):
            yield dialect, {"tools": [tool | more for tool in TOOLED[dialect]["tools"]]}


FOREIGN: dict[str, Any] = {
    "stop": ["x"],
    "temperature": 0.5,
    "logprobs": True,
    "tools": TOOLS,
    "response_format": {"type": "json_object"},
    "continue_final_message": True,
    "stream": True,
    "n": 2,
    "images": ["data:,"],
}
"""Fields of which each is refused by name where a dialect has none for what it asks for."""


def foreign() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields dialect and body of requests with a field of another dialect, or with a model that
    no worker serves."""
    for dialect in PATHS:
        for name, value in FOREIGN.items():
            yield dialect, {name: value}
        for model in ("elsewhere", "support-bot@7", "support-bot@staging"):
            yield dialect, {"model": model}


def cases() -> Iterator[tuple[str, str, dict[str, Any], Script]]:
    """Yields name, path, body and what the worker says of each case."""
    usual = say("hello", per_step=1000)
    tables = {"chat": [*SAMPLING, *CHAT], "text": [*SAMPLING, *TEXT]}
    tables |= {"messages": MESSAGES, "responses": RESPONSES}
    both = [("", usual, tables), *SAID]
    plain = tooled({"model": "tiny"}) | {"text": [{"model": "tiny", "max_tokens": 90}]}
    both += [(name, script, plain) for name, script in SCRIPTS.items()]
    for said, script, bodies in both:
        for dialect, variants in bodies.items():
            for number, body in enumerate(variants):
                for stream in (False, True):
                    how = {"stream": True} if stream else {}
                    name = f"{dialect} {said}{' streamed' if stream else ''}"
                    yield _case(name, number, dialect, body | how, script)
    for dialect, variants in WHOLE.items():
        for number, body in enumerate(variants):
            yield _case(f"{dialect} once", number, dialect, body, usual)
    for number, (dialect, body) in enumerate(foreign()):
        yield _case(f"{dialect} foreign", number, dialect, body, usual)
    for number, (dialect, body) in enumerate(histories()):
        yield _case(f"{dialect} history", number, dialect, body, usual)
    for number, (path, body) in enumerate(OTHERS):
        yield f"{path} {number}", path, {"model": "tiny", **body}, usual


def _case(
    kind: str, number: int, dialect: str, body: dict[str, Any], script: Script
) -> tuple[str, str, dict[str, Any], Script]:
    path, usual = PATHS[dialect]
    name = f"{kind} {number} {json.dumps(body, ensure_ascii=False)[:80]}"
    return name, path, {"model": "support-bot", **usual, **body}, script
