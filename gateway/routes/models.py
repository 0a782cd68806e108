"""What the caller may name as `model`."""

from __future__ import annotations

from litestar import get
from litestar.params import FromPath

from gateway.auth import INFERENCE, requires
from gateway.request import GatewayRequest
from gateway.schemas import ModelCard, ModelList


@get("/v1/models", guards=[requires(INFERENCE)])
async def list_models(request: GatewayRequest) -> ModelList:
    """Base models and the tenant's own adapters."""
    return ModelList(data=request.gateway.catalog.current.list(request.user.tenant))


@get("/v1/models/{model:path}", guards=[requires(INFERENCE)])
async def get_model(request: GatewayRequest, model: FromPath[str]) -> ModelCard:
    """One model, by any name that a request may use for it."""
    view = request.gateway.catalog.current
    return view.card(request.user.tenant, model.removeprefix("/"))
