"""Measures the memory that a long text takes on each route that reads texts. Run in a process of
its own by test_route_memory.py, because the peak is the process's."""

from __future__ import annotations

import json
import sys
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

from tests.gateway.templated import templated_service
from tests.gateway.text.text_memory import CHAR, peak, reset

CONTEXT = 1 << 17
NUM_CHARS = 900_000
"""As many characters pass the check before encoding, because one token stands for twelve."""
TEXT = "TEXT"
TURN = [{"role": "user", "content": TEXT}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURN},
    "/v1/completions": {"prompt": TEXT},
    "/v1/messages": {"messages": TURN, "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": TURN},
    "/v1/responses": {"input": TEXT},
    "/v1/embeddings": {"input": [TEXT], "truncate_prompt_tokens": 8},
    "/v2/embed": {"texts": [TEXT], "input_type": "classification", "max_tokens": 8},
    "/v1/score": {"text_1": "?", "text_2": TEXT},
    "/v1/rerank": {"query": "?", "documents": [TEXT], "truncate_prompt_tokens": 1000},
    "/tokenize": {"prompt": TEXT},
}
"""Body for each route, in which `TEXT` stands for the text."""


def main(folder: str) -> None:
    """Prints the status, the bytes taken beyond the body, and the CPU time, for each route."""
    with templated_service(Path(folder), length=CONTEXT) as service:
        text = CHAR * NUM_CHARS
        # Two tenants, because a tenant's refused bytes are limited.
        keys = cycle([service.keys.acme, service.keys.globex])
        found: dict[str, tuple[int, int, float]] = {}
        for path, fields in BODIES.items():
            body = json.dumps({"model": "tiny", **fields})
            headers = {"authorization": f"Bearer {next(keys)}", "content-type": "application/json"}
            httpx.post(service.url + path, content=body, headers=headers)
            long = body.replace(TEXT, text).encode()
            reset()
            before, started = peak(), time.process_time()
            answer = httpx.post(service.url + path, content=long, headers=headers, timeout=60)
            cpu_s = time.process_time() - started
            found[path] = answer.status_code, peak() - before - len(long), cpu_s
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
