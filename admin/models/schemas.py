"""The bodies of base models."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar

import msgspec

from admin.records import BaseModel, ModelState, Residency
from admin.schemas import EntityName, shown

Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
Length = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class ModelRegister(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    example: ClassVar[dict[str, Any]] = {
        "name": "llama",
        "digest": "b" * 64,
        "max_model_len": 8192,
    }
    name: EntityName
    digest: Digest
    """Digest of a model in the store."""
    max_model_len: Length | None = None
    """Tokens of prompt and answer; default and upper bound: what the model was made for."""
    source: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Name under which the weights were imported: adapters that were trained on it are for this
    model."""


class ModelChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is left out stays."""

    example: ClassVar[dict[str, Any]] = {"max_model_len": 4096}

    digest: Digest | None = None
    """Other weights, while no adapter is bound to those there are."""
    max_model_len: Length | None = None
    residency: Residency | None = None
    """Whether it is to be on devices: as it is asked for, always, or not at all."""


class ModelView(msgspec.Struct, frozen=True):
    name: str
    digest: str
    model_type: str
    max_model_len: int
    residency: Residency
    source: str
    created_at: datetime
    object: str = "model"

    @classmethod
    def of(cls, model: BaseModel) -> ModelView:
        return shown(cls, model, model_type=model.shape.model_type)


class ModelDetails(ModelView, frozen=True, kw_only=True):
    workers: list[ModelState]
    """Where it is. For admin keys; others see no worker."""

    @classmethod
    def with_states(cls, model: BaseModel, workers: list[ModelState]) -> ModelDetails:
        return shown(cls, ModelView.of(model), workers=workers)
