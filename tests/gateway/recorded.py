"""Answers of the gateway as they were recorded: the bytes of about 300 requests in all dialects,
the OpenAPI documents, the help of every command, and the names of metrics.

`python -m tools.record_gateway` writes `recorded.json.gz` anew after a change that is meant;
`test_recorded.py` compares.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec

from loraplex.cli import cli
from tests.admin.http.test_openapi import DOCUMENT
from tests.gateway.scripted import ScriptedWorker
from tests.gateway.scripts import Script, say
from tests.gateway.service import Service
from tools.source_tree import ROOT
from workers.wire.client import WorkerFailed
from workers.wire.protocol import ErrorCode, Generate, SequenceOutput

RECORD = Path(__file__).with_name("recorded.json.gz")
METRIC = re.compile(r'"((?:vllm[:.]|loraplex_|gen_ai\.|http\.)[\w.]+)"')
VARYING = (
    (re.compile(r"[0-9a-f]{24,}"), "HEX"),
    (re.compile(r"\b(call|fc|toolu|rs|item)_[0-9A-Za-z]{16,}"), r"\1_ID"),
    (re.compile(r'"(created|created_at|completed_at)":[0-9.]+'), r'"\1":0'),
)
VARYING_HEADERS = {"date", "openai-processing-ms", "x-ratelimit-reset-requests"}

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
]
GETS = (
    *("/v1/models", "/v1/models/tiny", "/v1/models/support-bot", "/v1/models/support-bot@3"),
    *("/v1/models/nowhere", "/livez", "/readyz", "/health", "/v1", "/v1/chat/completion"),
    *("/", "/v1//models", "/v1/chat/completions", "/ping", "/version"),
)
"""Routes that are requested with GET. The OpenAPI document is compared as an object."""
RAW = (b"", b"{", b"[]", b"null", b'"text"', b'{"model": "tiny", "messages": "\xff"}', b"[" * 70000)
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


class Exchange(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: str


class Recorded(msgspec.Struct):
    exchanges: dict[str, Exchange]
    documents: dict[str, Any]
    """OpenAPI documents of both planes."""
    helps: dict[str, str]
    metrics: list[str]


def failing(code: ErrorCode) -> Script:
    """Returns a script that fails at once."""

    async def script(request: Generate):
        if request.id < 0:
            yield SequenceOutput(request.id, [])
        raise WorkerFailed(code, "what the worker says")

    return script


def bodies() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields a name, a path and a body for each request that is answered with the usual text."""
    bases: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
        "chat": ("/v1/chat/completions", {"messages": HI, "max_tokens": 20}, [*SAMPLING, *CHAT]),
        "text": ("/v1/completions", {"prompt": "Hi", "max_tokens": 20}, [*SAMPLING, *TEXT]),
        "messages": ("/v1/messages", {"messages": HI, "max_tokens": 20}, MESSAGES),
        "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": 20}, RESPONSES),
    }
    for dialect, (path, base, variants) in bases.items():
        for number, more in enumerate(variants):
            for how in ({}, {"stream": True}):
                name = f"{dialect} {number} {json.dumps(more)[:80]}{' streamed' if how else ''}"
                yield name, path, {"model": "support-bot", **base, **more, **how}
    for number, (path, body) in enumerate(OTHERS):
        yield f"{path} {number}", path, {"model": "tiny", **body}


def exchanges(service: Service) -> dict[str, Exchange]:
    """Sends all requests to a service with the template of Qwen 3. Returns the answers by name."""
    worker: ScriptedWorker = service.worker
    found: dict[str, Exchange] = {}
    key = {"authorization": f"Bearer {service.keys.acme}"}
    with httpx.Client(base_url=service.url, timeout=20, headers=key) as client:

        def send(name: str, path: str, method: str = "POST", **options: Any) -> None:
            found[name] = _exchange(client.request(method, path, **options))

        worker.script = say("hello", per_step=1000)
        for name, path, body in bodies():
            send(name, path, json=body)
        for path in GETS:
            send(f"GET {path}", path, "GET")
        for number, raw in enumerate(RAW):
            send(f"raw {number}", "/v1/chat/completions", content=raw)
        for headers in HEADERS:
            body = {"model": "tiny", "messages": HI, "max_tokens": 5}
            send(f"headers {headers}", "/v1/chat/completions", json=body, headers=headers)
        starts = {
            "chat": ("/v1/chat/completions", {"messages": HI, "tools": TOOLS, "max_tokens": 90}),
            "messages": (
                "/v1/messages",
                {
                    "messages": HI,
                    "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
                    "max_tokens": 90,
                },
            ),
            "responses": (
                "/v1/responses",
                {
                    "input": "Hi",
                    "tools": [{"type": "function", **FUNCTION}],
                    "max_output_tokens": 90,
                },
            ),
            "text": ("/v1/completions", {"prompt": "Hi", "max_tokens": 90}),
        }
        scripts = SCRIPTS | {f"fails: {code.value}": failing(code) for code in ErrorCode}
        for said, script in scripts.items():
            worker.script = script
            for dialect, (path, base) in starts.items():
                for how in ({}, {"stream": True}):
                    body = {"model": "tiny", **base, **how}
                    send(f"{dialect} {said}{' streamed' if how else ''}", path, json=body)
    return found


def _exchange(answer: httpx.Response) -> Exchange:
    headers = {
        name: _same(value)
        for name, value in sorted(answer.headers.items())
        if name not in VARYING_HEADERS and name != "content-length"
    }
    return Exchange(answer.status_code, headers, _same(answer.text))


def _same(text: str) -> str:
    """Returns the text without what differs from run to run."""
    for pattern, name in VARYING:
        text = pattern.sub(name, text)
    return text


def helps() -> dict[str, str]:
    """Returns the help of each command by its name."""
    found: dict[str, str] = {}

    def visit(command: click.Command, name: str, parent: click.Context | None) -> None:
        context = command.context_class(command, info_name=name.split()[-1], parent=parent,
                                        terminal_width=80, **command.context_settings)  # fmt: skip
        found[name] = command.get_help(context)
        if isinstance(command, click.Group):
            for each in command.list_commands(context):
                below = command.get_command(context, each)
                assert below is not None
                visit(below, f"{name} {each}", context)

    visit(cli, "loraplex", None)
    return found


def metrics() -> list[str]:
    """Returns the names of metrics in the source of the product."""
    folders = ("gateway", "telemetry", "loraplex", "web")
    texts = (file.read_text() for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return sorted({name for text in texts for name in METRIC.findall(text)})


def documents(service: Service) -> dict[str, Any]:
    schema = httpx.get(f"{service.url}/schema", timeout=20).json()
    return {"gateway": schema, "admin": DOCUMENT}


def recorded_now(service: Service) -> Recorded:
    return Recorded(exchanges(service), documents(service), helps(), metrics())


def read() -> Recorded:
    return msgspec.json.decode(gzip.decompress(RECORD.read_bytes()), type=Recorded)


def write(record: Recorded) -> None:
    text = msgspec.json.format(msgspec.json.encode(record, order="sorted"))
    RECORD.write_bytes(gzip.compress(text, mtime=0))
