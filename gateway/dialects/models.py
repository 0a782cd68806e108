"""OpenAI's list of models: GET /v1/models."""

from __future__ import annotations

import msgspec

from gateway.catalog.cards import ModelCard


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"
