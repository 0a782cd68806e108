"""A random Llama of few layers served by the whole product, for what is not about the model."""

from __future__ import annotations

import json
from pathlib import Path

from adapters.manifest import BaseModelShape
from adapters.store.folder import LocalStore
from gateway.text.long_texts import LongTexts
from gateway.text.template_process import TemplateProcesses
from gateway.text.tokenizer import ModelTokenizer
from tests.doubles import make_model
from tests.stack import Stack
from workers.importer import import_model

NAME = "tiny"
MAX_MODEL_LEN = 2048


class Tiny:
    """The model's files; `stack` makes a server of it."""

    def __init__(
        self,
        folder: Path,
        *,
        num_layers: int = 2,
        max_model_len: int = MAX_MODEL_LEN,
        **changes: object,
    ) -> None:
        """changes: of the model's config."""
        changes |= {"num_hidden_layers": num_layers, "max_position_embeddings": max_model_len}
        source = make_model(folder / "source", "llama", **changes)
        digest = import_model(source, LocalStore(folder / "store"))
        self.folder = folder
        self.max_model_len = max_model_len
        self.model = folder / "store" / "models" / digest
        config = json.loads((self.model / "config.json").read_text())
        self.shape = BaseModelShape.from_config(config, digest)
        self.tokenizer = ModelTokenizer(self.model, LongTexts(), TemplateProcesses())

    def stack(self, **settings: object) -> Stack:
        """Greedy answers in float32; one kernel thread, for the model is smaller than a barrier."""
        settings = {"dtype": "float32", "threads": 1, **settings}
        return Stack(self.folder / "data", "--model", f"{NAME}={self.model}", **settings)
