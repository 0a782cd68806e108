"""Answers of the gateway as they were recorded: the bytes of requests in all dialects,
the OpenAPI documents, the help of every command, and the names of metrics.

`python -m tools.record_gateway` writes `recorded.json.gz` anew after a change that is meant;
`test_recorded.py` compares.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec

from loraplex.cli import cli
from tests.admin.http.test_openapi import DOCUMENT
from tests.gateway.dialects.cases import GETS, HEADERS, HI, PATHS, RAW, cases
from tests.gateway.scripts import Script, say, spelled
from tests.gateway.service import Service
from tests.scripted_worker import ScriptedWorker
from tools.source_tree import ROOT
from workers.wire.client import WorkerFailed
from workers.wire.protocol import ErrorCode, Generate, SamplingParams, SequenceOutput

RECORD = Path(__file__).with_name("recorded.json.gz")
METRIC = re.compile(r'"((?:vllm[:.]|loraplex_|gen_ai\.|http\.)[\w.]+)"')
VARYING = (
    (re.compile(r"[0-9a-f]{24,}"), "HEX"),
    (re.compile(r"\b(call|fc|toolu|rs|item)_[0-9A-Za-z]{16,}"), r"\1_ID"),
    (re.compile(r'"(created|created_at|completed_at)":[0-9.]+'), r'"\1":0'),
)
MOST_SEED = 1000
"""A seed beyond it was drawn by the gateway."""
VARYING_HEADERS = {"date", "openai-processing-ms", "x-ratelimit-reset-requests"}


USUAL = Generate(0, "", "", [], SamplingParams(0, 0), "")


class Exchange(msgspec.Struct, omit_defaults=True):
    status: int
    headers: dict[str, str]
    body: str
    asked: list[dict[str, Any]] = []
    """What the worker was asked, without what differs from run to run and without defaults."""


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


def exchanges(service: Service) -> dict[str, Exchange]:
    """Sends all requests to a service with the template of Qwen 3. Returns the answers by name."""
    worker: ScriptedWorker = service.worker
    found: dict[str, Exchange] = {}
    key = {"authorization": f"Bearer {service.keys.acme}"}
    with httpx.Client(base_url=service.url, timeout=20, headers=key) as client:

        def send(name: str, path: str, method: str = "POST", **options: Any) -> None:
            assert name not in found, name
            before = len(worker.requests)
            answer = client.request(method, path, **options)
            found[name] = _exchange(answer, worker.requests[before:])

        for name, path, body, worker.script in cases():
            send(name, path, json=body)
        for code in ErrorCode:
            worker.script = failing(code)
            for dialect, (path, base) in list(PATHS.items())[:4]:
                for how in ({}, {"stream": True}):
                    name = f"{dialect} fails: {code.value}{' streamed' if how else ''}"
                    send(name, path, json={"model": "tiny", **base, **how})
        for path in GETS:
            send(f"GET {path}", path, "GET")
        for number, raw in enumerate(RAW):
            for route in ("chat/completions", "completions"):
                send(f"raw {number} {route}", f"/v1/{route}", content=raw)
        worker.script = say("hello", per_step=1000)
        for headers in HEADERS:
            body = {"model": "tiny", "messages": HI, "max_tokens": 5}
            send(f"headers {headers}", "/v1/chat/completions", json=body, headers=headers)
    return found


def _asked(requests: list[Generate]) -> list[dict[str, Any]]:
    """Returns what requests say beyond defaults. A drawn seed is told as the number of the draw."""
    told: list[dict[str, Any]] = []
    drawn: list[int] = []
    for request in sorted(requests, key=lambda each: (each.tokens, each.params.choice)):
        fields = _beyond(USUAL, request)
        for name in ("id", "request_id", "timeout_s", "traceparent"):
            fields.pop(name, None)
        fields["tokens"] = _text(request.tokens)
        fields["params"] = _beyond(USUAL.params, request.params)
        if abs(seed := request.params.seed) > MOST_SEED:
            drawn += [] if seed in drawn else [seed]
            fields["params"]["seed"] = f"drawn {drawn.index(seed)}"
        told.append(msgspec.json.decode(msgspec.json.encode(fields)))
    return told


def _beyond(usual: msgspec.Struct, struct: msgspec.Struct) -> dict[str, Any]:
    """Returns the fields whose values are not the usual ones."""
    fields = msgspec.structs.asdict(struct)
    return {name: value for name, value in fields.items() if value != getattr(usual, name)}


def _text(tokens: list[int]) -> str:
    """Returns the tokens as text, or as numbers if some have none."""
    try:
        return spelled(tokens)
    except (KeyError, UnicodeDecodeError):
        return str(tokens)


def _exchange(answer: httpx.Response, requests: list[Generate]) -> Exchange:
    headers = {
        name: _same(value)
        for name, value in sorted(answer.headers.items())
        if name not in VARYING_HEADERS and name != "content-length"
    }
    return Exchange(answer.status_code, headers, _same(answer.text), _asked(requests))


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
        # Click keeps the first option --help, which another test may have made without a parent.
        setattr(command, "_help_option", None)  # noqa: B010
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
