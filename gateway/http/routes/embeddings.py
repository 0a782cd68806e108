"""The routes that answer with vectors."""

from __future__ import annotations

from litestar.params import JSONBody

from gateway.dialects.embeddings import EmbeddingRequest, Embeddings
from gateway.http.guards import INFERENCE, requires
from gateway.http.handlers import HotRoute
from gateway.http.request import GatewayRequest
from gateway.http.routes.completions import answer
from gateway.http.streaming import GenerationResponse

EMBEDDINGS = Embeddings()


@HotRoute("/v1/embeddings", http_method="POST", guards=[requires(INFERENCE)], status_code=200)
async def create_embeddings(
    request: GatewayRequest, data: JSONBody[EmbeddingRequest]
) -> GenerationResponse:
    """A vector of each input, of length 1."""
    return await answer(request, EMBEDDINGS, data)
