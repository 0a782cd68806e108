"""Request and response bodies of base models."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar, Self

import msgspec

from admin.schemas import EntityName, shown
from store.records import BaseModel, ModelState, Residency

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
    """Maximum tokens of prompt and answer. Default and upper bound: the model's own maximum."""
    source: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Name under which the weights were imported. Adapters that were trained on a model of this
    name are for this model."""


class ModelChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes of a base model. Omitted fields keep their values."""

    example: ClassVar[dict[str, Any]] = {"max_model_len": 4096}

    digest: Digest | None = None
    """Digest of other weights. Allowed if no adapter is bound to the present ones."""
    max_model_len: Length | None = None
    residency: Residency | None = None
    """Whether workers load the model: on request, always, or never."""


class ModelView(msgspec.Struct, frozen=True):
    name: str
    digest: str
    model_type: str
    served_by: str
    """Code that computes the model: `native`, or `transformers` for its modelling file."""
    max_model_len: int
    residency: Residency
    source: str
    created_at: datetime
    object: str = "model"

    @classmethod
    def of(cls, model: BaseModel, **others: Any) -> Self:
        shape = model.shape
        return shown(cls, model, model_type=shape.model_type, served_by=shape.served_by, **others)


class ModelDetails(ModelView, frozen=True, kw_only=True):
    workers: list[ModelState]
    """State of the model on each worker. Empty unless the caller has an admin key."""
