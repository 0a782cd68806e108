"""What a served name is, as `/v1/models` shows it."""

from __future__ import annotations

import msgspec

from admin.records import GenerationDefaults


class AdapterCard(msgspec.Struct, frozen=True):
    """What an adapter version brings besides its weights."""

    version: int
    canary: dict[int, int] | None
    """Version to weight, where the name is split over several; the rest is of the stable one."""
    has_chat_template: bool
    is_chat_template_approved: bool
    """Until then chats are refused, completions served; true without a template."""
    stop: tuple[str, ...]
    """Ends answers as the request's own do."""
    stop_token_ids: tuple[int, ...]
    """As `stop`: tokens beside the base model's own."""
    defaults: GenerationDefaults
    """Taken for what a request leaves out."""
    metadata: dict[str, str]


class ModelCard(msgspec.Struct, frozen=True):
    """`root` is what the name stands for now, `parent` the base of an adapter."""

    id: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    adapter: AdapterCard | None = None
    object: str = "model"


class ModelList(msgspec.Struct, frozen=True):
    """The answer of GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"
