"""Routes of base models: register a model of the store under a name, list, show, change, delete."""

from __future__ import annotations

import asyncio

from litestar import Controller, Response, delete, get, patch, post
from litestar.params import FromPath, JSONBody

from adapters.manifest import BaseModelShape
from admin.http.entities import page
from admin.http.guards import ADAPTERS_WRITE, ADMIN, requires
from admin.http.idempotency import IdempotencyKey, once
from admin.http.parameters import After, Limit
from admin.http.preconditions import IfMatch, Tagged, etag, locked, tagged
from admin.http.request import AdminRequest
from admin.models import models
from admin.models.schemas import ModelChange, ModelDetails, ModelRegister, ModelView
from admin.schemas import Deleted, Page
from admin.workers import workers
from store.database import Connection
from store.errors import Invalid, Overtaken
from store.records import BaseModel


class ModelController(Controller):
    path = "/models"
    tags = ("models",)

    @post(guards=[requires(ADMIN)])
    async def register_model(
        self,
        request: AdminRequest,
        data: JSONBody[ModelRegister],
        idempotency_key: IdempotencyKey = None,
    ) -> Response[ModelView]:
        """Registers a model under a name. It must have been imported into the store. Repeating this
        has no effect."""
        shape, length = await _describe(request, data.digest, data.max_model_len)

        async def create(connection: Connection, _seed: bytes) -> ModelView:
            made = await models.register_model(connection, data.name, shape, length, data.source)
            return ModelView.of(made)

        return await once(request, idempotency_key, create)

    @get(guards=[requires(ADMIN, ADAPTERS_WRITE)])
    async def list_models(
        self, request: AdminRequest, after: After = "", limit: Limit = 100
    ) -> Page[ModelDetails]:
        """Lists models by name, with the tier of each model on each worker."""
        async with request.reading() as connection:
            found = await models.list_models(connection, after, limit + 1)
            states = await workers.model_states(connection, {model.digest for model in found})
        return page([ModelDetails.of(m, workers=states[m.digest]) for m in found], limit)

    @get("/{name:str}", guards=[requires(ADMIN, ADAPTERS_WRITE)])
    async def show_model(self, request: AdminRequest, name: FromPath[str]) -> Tagged[ModelDetails]:
        """Shows a model and its tier on each worker. The ETag does not cover the tiers."""
        async with request.reading() as connection:
            model = await models.find_model(connection, name)
            states = await workers.model_states(connection, [model.digest])
        details = ModelDetails.of(model, workers=states[model.digest])
        return tagged(details, etag(ModelView.of(model)))

    @patch("/{name:str}", guards=[requires(ADMIN)])
    async def change_model(
        self,
        request: AdminRequest,
        name: FromPath[str],
        data: JSONBody[ModelChange],
        if_match: IfMatch = None,
    ) -> Tagged[ModelView]:
        """Changes a model. 409 for other weights while adapters are bound to the present ones.
        Workers load, keep or unload the model as its residency demands, once running requests
        permit it."""
        async with request.reading() as connection:
            known = await models.find_model(connection, name)
        digest = data.digest or known.digest
        is_same = digest == known.digest
        source = known.source if is_same else ""
        length = data.max_model_len or (known.max_model_len if is_same else None)
        if data.digest is None and data.max_model_len is None:
            shape, length = known.shape, known.max_model_len
        else:
            shape, length = await _describe(request, digest, length)
        async with request.transaction() as connection:
            if await _locked(connection, if_match, name) != known:
                raise Overtaken
            changed = await models.register_model(connection, name, shape, length, source)
            if data.residency is not None:
                changed = await models.set_residency(connection, name, data.residency)
        return tagged(ModelView.of(changed))

    @delete("/{name:str}", guards=[requires(ADMIN)], status_code=200)
    async def delete_model(
        self, request: AdminRequest, name: FromPath[str], if_match: IfMatch = None
    ) -> Deleted:
        """Deletes a model's name and price. 409 while adapters are bound to it. The store keeps the
        files."""
        async with request.transaction() as connection:
            await _locked(connection, if_match, name)
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


async def _locked(connection: Connection, if_match: str | None, name: str) -> BaseModel:
    return await locked(connection, if_match, ModelView.of, models.find_model, name)
