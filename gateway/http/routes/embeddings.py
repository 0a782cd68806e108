"""Defines the routes that answer with vectors or with relevance scores."""

from __future__ import annotations

from litestar.types import ASGIApp

from gateway.dialects.cohere_embeddings import CohereEmbeddings, EmbedRequest
from gateway.dialects.embeddings import EmbeddingRequest, Embeddings
from gateway.dialects.relevance_scores import Reranking, RerankRequest, ScoreRequest, Scores
from gateway.http.request import HttpRequest
from gateway.http.routes.completions import answer, answering

EMBEDDINGS = Embeddings()
COHERE_EMBEDDINGS = CohereEmbeddings()
SCORES = Scores()
RERANKING = Reranking()


@answering("/v1/embeddings")
async def create_embeddings(request: HttpRequest, data: EmbeddingRequest) -> ASGIApp:
    """Returns a vector of length 1 for each input."""
    return await answer(request, EMBEDDINGS, data)


@answering("/v2/embed")
async def embed(request: HttpRequest, data: EmbedRequest) -> ASGIApp:
    """Returns a vector of length 1 for each text, in Cohere's form."""
    return await answer(request, COHERE_EMBEDDINGS, data)


@answering("/v1/score", "/score")
async def create_scores(request: HttpRequest, data: ScoreRequest) -> ASGIApp:
    """Returns how relevant texts are to other texts, from 0 to 1, as computed by a reranker."""
    return await answer(request, SCORES, data)


@answering("/v1/rerank", "/v2/rerank", "/rerank")
async def rerank(request: HttpRequest, data: RerankRequest) -> ASGIApp:
    """Returns documents by their relevance to a query, as a causal reranker judges."""
    return await answer(request, RERANKING, data)
