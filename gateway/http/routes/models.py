"""Defines the routes that list the names that the caller may use as `model`."""

from __future__ import annotations

import asyncio
import contextlib

from gateway.catalog.resolved_model import ModelCard, ModelList
from gateway.exceptions import ModelNotFound
from gateway.http.request import INFERENCE, HttpRequest
from gateway.http.routing import Answer, get

CARDS_AT_ONCE = 100
"""Number of model cards created before the event loop runs other requests."""


@get("/v1/models", needs=INFERENCE)
async def list_models(request: HttpRequest) -> Answer[ModelList]:
    """Returns base models and the tenant's own adapters that the key may use."""
    caller, view = request.caller, request.gateway.catalog.current
    cards: list[ModelCard] = []
    names = filter(caller.may_use, view.names(caller.tenant))
    for number, name in enumerate(names, 1):
        with contextlib.suppress(ModelNotFound):
            cards.append(view.card(caller.tenant, name))
        if number % CARDS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return Answer(ModelList(data=cards))


@get("/v1/models/{model}", needs=INFERENCE)
async def get_model(request: HttpRequest, model: str) -> Answer[ModelCard]:
    """Returns one model, by any name that a request may use for it."""
    if not request.caller.may_use(model):
        raise ModelNotFound(model)
    return Answer(request.gateway.catalog.current.card(request.caller.tenant, model))
