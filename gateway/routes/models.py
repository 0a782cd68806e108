"""What the caller may name as `model`."""

from __future__ import annotations

from litestar import get
from litestar.params import FromPath

from gateway.auth import INFERENCE, requires
from gateway.errors import ModelNotFound
from gateway.request import GatewayRequest
from gateway.schemas import ModelCard, ModelList


@get("/v1/models", guards=[requires(INFERENCE)])
async def list_models(request: GatewayRequest) -> ModelList:
    """Base models and the tenant's own adapters, as far as the key may use them."""
    caller = request.user
    cards = request.gateway.catalog.current.list(caller.tenant)
    return ModelList(data=[card for card in cards if caller.may_use(card.id)])


@get("/v1/models/{model:path}", guards=[requires(INFERENCE)])
async def get_model(request: GatewayRequest, model: FromPath[str]) -> ModelCard:
    """One model, by any name that a request may use for it."""
    caller, name = request.user, model.removeprefix("/")
    if not caller.may_use(name):
        raise ModelNotFound(name)
    return request.gateway.catalog.current.card(caller.tenant, name)
