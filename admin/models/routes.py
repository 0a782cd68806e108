"""Routes of base models: register a model of the store under a name, list, show, change, delete."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from adapters.manifest import BaseModelShape
from admin.http.entities import Entity
from admin.http.guards import ADAPTERS_WRITE, ADMIN
from admin.http.request import AdminRequest
from admin.models import models
from admin.models.schemas import ModelChange, ModelDetails, ModelRegister, ModelView
from admin.schemas import Deleted, shown
from admin.workers import workers
from store.database import Connection
from store.errors import Invalid, Overtaken
from store.records import BaseModel

MODELS = Entity(
    *("Model", "/models", "models", ModelView, models.find_model),
    covers=lambda view: shown(ModelView, view),
)
_SEEN = (ADMIN, ADAPTERS_WRITE)


async def _describe_new(request: AdminRequest, data: ModelRegister) -> tuple[BaseModelShape, int]:
    return await _describe(request, data.digest, data.max_model_len)


@MODELS.creates(prepare=_describe_new)
async def register_model(
    connection: Connection, data: ModelRegister, prepared: tuple[BaseModelShape, int]
) -> BaseModel:
    """Registers a model under a name. It must have been imported into the store. Repeating this
    has no effect."""
    return await models.register_model(connection, data.name, *prepared, data.source)


@MODELS.lists(scopes=_SEEN)
async def list_models(connection: Connection, after: str, limit: int) -> list[ModelDetails]:
    """Lists models by name, with the tier of each model on each worker."""
    found = await models.list_models(connection, after, limit)
    states = await workers.model_states(connection, {model.digest for model in found})
    return [ModelDetails.of(model, workers=states[model.digest]) for model in found]


@MODELS.shows("/{name:str}", scopes=_SEEN)
async def show_model(connection: Connection, name: str) -> ModelDetails:
    """Shows a model and its tier on each worker. The ETag does not cover the tiers."""
    model = await models.find_model(connection, name)
    states = await workers.model_states(connection, [model.digest])
    return ModelDetails.of(model, workers=states[model.digest])


class _Change(NamedTuple):
    """Change of a model, as it was before."""

    known: BaseModel
    shape: BaseModelShape
    length: int
    source: str


async def _describe_change(request: AdminRequest, name: str, data: ModelChange) -> _Change:
    async with request.reading() as connection:
        known = await models.find_model(connection, name)
    digest = data.digest or known.digest
    is_same = digest == known.digest
    source = known.source if is_same else ""
    length = data.max_model_len or (known.max_model_len if is_same else None)
    if data.digest is None and data.max_model_len is None:
        return _Change(known, known.shape, known.max_model_len, source)
    return _Change(known, *await _describe(request, digest, length), source)


@MODELS.changes("PATCH", "/{name:str}", prepare=_describe_change)
async def change_model(
    connection: Connection, name: str, data: ModelChange, current: BaseModel, prepared: _Change
) -> BaseModel:
    """Changes a model. 409 for other weights while adapters are bound to the present ones.
    Workers load, keep or unload the model as its residency demands, once running requests
    permit it."""
    known, shape, length, source = prepared
    if current != known:
        raise Overtaken
    changed = await models.register_model(connection, name, shape, length, source)
    if data.residency is not None:
        changed = await models.set_residency(connection, name, data.residency)
    return changed


@MODELS.changes("DELETE", "/{name:str}")
async def delete_model(connection: Connection, name: str) -> Deleted:
    """Deletes a model's name and price. 409 while adapters are bound to it. The store keeps the
    files."""
    await models.delete_model(connection, name)
    return Deleted(name)


async def _describe(
    request: AdminRequest, digest: str, length: int | None
) -> tuple[BaseModelShape, int]:
    """Returns the shape of a model in the store, and its maximum length in tokens: `length`, or the
    model's own maximum if `length` is None. Raises Invalid."""
    shape, longest = await asyncio.to_thread(request.plane.describe_model, digest)
    if (length or longest) > longest:
        raise Invalid(f"the model was made for {longest} tokens", None, "max_model_len")
    return shape, length or longest
