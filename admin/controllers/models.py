"""Base models: register a digest of the store under a name, list, read."""

from __future__ import annotations

import asyncio

from litestar import Controller, get, post
from litestar.params import FromPath, JSONBody

from admin import models
from admin.errors import Invalid
from admin.guards import ADAPTERS_WRITE, ADMIN, requires
from admin.request import AdminRequest
from admin.schemas import ModelRegister, ModelView, Page


class ModelController(Controller):
    path = "/models"

    @post(guards=[requires(ADMIN)])
    async def register_model(
        self, request: AdminRequest, data: JSONBody[ModelRegister]
    ) -> ModelView:
        """The model must have been imported into the store; the same again changes nothing."""
        plane = request.plane
        shape, longest = await asyncio.to_thread(plane.describe_model, data.digest)
        max_model_len = data.max_model_len or longest
        if max_model_len > longest:
            raise Invalid(f"the model was made for {longest} tokens", None, "max_model_len")
        async with request.transaction() as connection:
            model = await models.register_model(connection, data.name, shape, max_model_len)
        return ModelView.of(model)

    @get(guards=[requires(ADMIN, ADAPTERS_WRITE)])
    async def list_models(self, request: AdminRequest) -> Page[ModelView]:
        async with request.reading() as connection:
            found = await models.list_models(connection)
        return Page(data=[ModelView.of(model) for model in found], has_more=False)

    @get("/{name:str}", guards=[requires(ADMIN, ADAPTERS_WRITE)])
    async def show_model(self, request: AdminRequest, name: FromPath[str]) -> ModelView:
        async with request.reading() as connection:
            return ModelView.of(await models.find_model(connection, name))
