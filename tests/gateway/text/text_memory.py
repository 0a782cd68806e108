"""Measures the memory that a request's texts take until they are encoded or refused. Run in a
process of its own by test_text_memory.py, because the peak is the process's."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from gateway.catalog.catalog import Principal
from gateway.catalog.view import CatalogView
from gateway.dispatch.prompts import encode_prompts
from gateway.exceptions import InvalidRequest
from gateway.request import Message, Pair, Request, Truncation
from gateway.text.long_texts import LongTexts
from gateway.text.template_process import TemplateProcesses
from gateway.text.tokenizer import ModelTokenizer
from store.records import Caller, Tenant
from tests.gateway.service import Keys, snapshot

CONTEXT = 8192
CHAR = "\U00013080"
"""Four tokens, as no merge joins its bytes."""
LONG = CHAR * 400_000
MANY = [CHAR * 2_000] * 200
"""Each fits the context, and all together are three times what a request may have."""


def question(document: str) -> Pair:
    return Pair("is it?", document)


def cut(num_tokens: int, side: Any) -> Truncation:
    return Truncation(num_tokens, side)


REQUESTS: dict[str, dict[str, Any]] = {
    "completion": {"prompts": [LONG]},
    "completions": {"prompts": MANY},
    "embeddings": {"prompts": MANY, "kind": "embed", "max_tokens": 0},
    "chat": {"messages": [Message("user", LONG)]},
    "turns": {"messages": [Message("user", text) for text in MANY]},
    "pairs": {"pairs": [question(text) for text in MANY], "kind": "embed", "max_tokens": 0},
    "completion, end kept": {"prompts": [LONG], "truncation": cut(8, "left")},
    "completion, beginning kept": {"prompts": [LONG], "truncation": cut(8, "right")},
    "chat, end kept": {"messages": [Message("user", LONG)], "truncation": cut(8, "left")},
    "documents of some tokens": {
        "pairs": [question(LONG)],
        "max_document_tokens": 8,
        "kind": "embed",
        "max_tokens": 0,
    },
    "documents, end kept": {
        "pairs": [question(LONG)],
        "truncation": cut(200, "left"),
        "kind": "embed",
        "max_tokens": 0,
    },
    "query, beginning kept": {
        "pairs": [Pair(LONG, "a")],
        "truncation": cut(200, "right"),
        "kind": "embed",
        "max_tokens": 0,
    },
    "legal": {"prompts": [CHAR * (CONTEXT // 4)], "max_tokens": 0, "kind": "embed"},
}
"""Fields of requests, by name."""


def peak() -> int:
    """Bytes that the process has had at most since `reset`."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    return int(line.split()[1]) << 10


def reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main(folder: str, name: str) -> None:
    """Prints the outcome, the bytes that were taken, and the CPU time in seconds."""
    tokenizer = ModelTokenizer(Path(folder), LongTexts(), TemplateProcesses())
    view = CatalogView(snapshot(Keys().records, max_model_len=CONTEXT))
    tenant = Tenant(id="ten_acme", name="acme")
    target = view.resolve(tenant, "tiny")
    base = msgspec.structs.replace(
        target.base, shape=msgspec.structs.replace(target.base.shape, vocab_size=60_000)
    )
    target = msgspec.structs.replace(target, base=base)
    caller = Principal(tenant, Caller("k", "key", tenant.id, frozenset()))
    request = Request(model="tiny", **REQUESTS[name])
    small = Request(model="tiny", prompts=["a word"])
    asyncio.run(encode_prompts(tokenizer, target, small, caller))
    reset()
    before, started = peak(), time.process_time()
    try:
        prompts = asyncio.run(encode_prompts(tokenizer, target, request, caller))
        outcome = f"{[len(prompt.tokens) for prompt in prompts]}"
    except InvalidRequest as error:
        outcome = error.code or "invalid"
    print(json.dumps([outcome, peak() - before, time.process_time() - started]))


if __name__ == "__main__":
    main(*sys.argv[1:])
