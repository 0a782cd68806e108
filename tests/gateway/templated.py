"""A gateway whose model has the chat template of a real family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tests.gateway.service import Service, make_store, snapshot
from tests.scripted_worker import DIGEST, LAYOUT
from workers.wire.protocol import ModelInfo

QWEN3 = Path(__file__).parent / "text/templates/qwen3.jinja"
FIRST_ADDED = 260
LENGTH = 4096
"""Tokens of the model's context: such a template writes long prompts."""


@contextmanager
def templated_service(
    folder: Path, template: Path = QWEN3, added: tuple[str, ...] = (), length: int = LENGTH
) -> Iterator[Service]:
    """Serves the tiny model with this chat template. `added`: further tokens, from `FIRST_ADDED`
    on. `length`: tokens of the context."""
    store = make_store(folder)
    tokenizer = Tokenizer.from_file(str(store / DIGEST / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    tokenizer.save(str(store / DIGEST / "tokenizer.json"))
    path = store / DIGEST / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": template.read_text()}
    path.write_text(json.dumps(config))
    service = Service(store)
    service.worker.models = [ModelInfo(DIGEST, "tiny", length, LAYOUT)]
    service.start()
    longer = snapshot(service.keys.records, generation=2, max_model_len=length)
    service.feed(longer)
    yield service
    service.stop()
