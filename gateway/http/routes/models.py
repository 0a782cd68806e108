"""Defines the routes that list the names that the caller may use as `model`."""

from __future__ import annotations

import asyncio
import contextlib

from litestar import get
from litestar.params import FromPath

from gateway.catalog.cards import ModelCard, ModelList
from gateway.exceptions import ModelNotFound
from gateway.http.guards import INFERENCE, requires
from gateway.http.request import HttpRequest

CARDS_AT_ONCE = 100
"""Number of model cards created before the event loop runs other requests."""


@get("/v1/models", guards=[requires(INFERENCE)])
async def list_models(request: HttpRequest) -> ModelList:
    """Returns base models and the tenant's own adapters that the key may use."""
    caller, view = request.user, request.gateway.catalog.current
    cards: list[ModelCard] = []
    names = filter(caller.may_use, view.names(caller.tenant))
    for number, name in enumerate(names, 1):
        with contextlib.suppress(ModelNotFound):
            cards.append(view.card(caller.tenant, name))
        if number % CARDS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return ModelList(data=cards)


@get("/v1/models/{model:path}", guards=[requires(INFERENCE)])
async def get_model(request: HttpRequest, model: FromPath[str]) -> ModelCard:
    """Returns one model, by any name that a request may use for it."""
    caller, name = request.user, model.removeprefix("/")
    if not caller.may_use(name):
        raise ModelNotFound(name)
    return request.gateway.catalog.current.card(caller.tenant, name)
