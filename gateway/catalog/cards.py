"""Defines the descriptions of models that `/v1/models` returns."""

from __future__ import annotations

import msgspec

from store.records import ServingFields


class AdapterCard(ServingFields, frozen=True, kw_only=True):
    """Data of an adapter version apart from its weights."""

    version: int
    canary: dict[int, int] | None
    """Weight by version if the name is a canary. The stable version gets the rest."""
    has_chat_template: bool
    is_chat_template_approved: bool
    """Whether chats are accepted. Otherwise only completions are served. True without a
    template."""


class ModelCard(msgspec.Struct, frozen=True):
    """Card of a model. `root` is what the name stands for now, `parent` the base of an adapter."""

    id: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    adapter: AdapterCard | None = None
    object: str = "model"


class ModelList(msgspec.Struct, frozen=True):
    """Answer of GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"
    models: list[ModelCard] = []
    """Always empty. Codex needs the key to read the answer, and then offers its configured
    models."""
