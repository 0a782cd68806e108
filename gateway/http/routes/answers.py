"""Defines the routes that workers answer, each of which passes its body to `answer`."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from litestar.types import ASGIApp

from gateway.dialects.chat_completions import ChatCompletionRequest, ChatCompletions
from gateway.dialects.cohere_embeddings import CohereEmbeddings, EmbedRequest
from gateway.dialects.completions import CompletionRequest, Completions
from gateway.dialects.dialect import AnswerContext, AnswerFormat, Dialect
from gateway.dialects.dropped import header_of
from gateway.dialects.embeddings import EmbeddingRequest, Embeddings
from gateway.dialects.messages import Messages
from gateway.dialects.messages_fields import MessagesRequest
from gateway.dialects.relevance_scores import Reranking, RerankRequest, ScoreRequest, Scores
from gateway.dialects.responses import Responses
from gateway.dialects.responses_fields import ResponsesRequest
from gateway.http.request import INFERENCE, HttpRequest
from gateway.http.routing import Headers, post
from gateway.http.streaming import StreamResponse, WholeResponse
from gateway.request import Request
from gateway.requests.request_scope import Started

CHAT_COMPLETIONS = ChatCompletions()
COMPLETIONS = Completions()
RESPONSES = Responses()
MESSAGES = Messages()
EMBEDDINGS = Embeddings()
COHERE_EMBEDDINGS = CohereEmbeddings()
SCORES = Scores()
RERANKING = Reranking()

B = TypeVar("B")

answering = partial(post, needs=INFERENCE, on_worker=True)


@answering("/v1/chat/completions")
async def create_chat_completion(request: HttpRequest, data: ChatCompletionRequest) -> ASGIApp:
    """Answers a conversation, as one body or as a stream of server-sent events."""
    return await answer(request, CHAT_COMPLETIONS, data)


@answering("/v1/completions")
async def create_completion(request: HttpRequest, data: CompletionRequest) -> ASGIApp:
    """Continues one or many prompts, as one body or as a stream of server-sent events."""
    return await answer(request, COMPLETIONS, data)


@answering("/v1/responses")
async def create_response(request: HttpRequest, data: ResponsesRequest) -> ASGIApp:
    """Answers a conversation of items, as one response or as a stream of events. Stores nothing."""
    return await answer(request, RESPONSES, data)


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


@answering("/v1/messages")
async def create_message(request: HttpRequest, data: MessagesRequest) -> ASGIApp:
    """Answers a conversation, as one message or as a stream of its blocks."""
    return await answer(request, MESSAGES, data)


async def answer(http: HttpRequest, dialect: Dialect[B], body: B) -> ASGIApp:
    """Starts the request and returns its answer as an ASGI application, which has sent nothing
    yet."""
    request = dialect.read(body).with_dropped(*http.dropped)
    http.read_deadline()
    started = await http.context.start(request)
    run, generation, settlement = started.run, started.generation, started.settlement
    sampling = AnswerContext(run.request_id, run.tokenizer.spelling.all, generation.sampling)
    format = dialect.answer_format(body, sampling)
    parts = http.context, generation, _headers(started), settlement
    if not (request.stream and isinstance(format, AnswerFormat)):
        return WholeResponse(*parts, format)
    return StreamResponse(*parts, format, http.gateway.config.ping_interval_s)


def _headers(started: Started) -> Headers:
    run, reservation, generation = started.run, started.reservation, started.generation
    request, version = run.request, run.target.version
    if request.max_tokens is not None and min(reservation.max_tokens) < request.max_tokens:
        request = request.with_dropped(request.max_tokens_param)
    headers = [
        (b"loraplex-worker", generation.worker_id.encode()),
        *dropped_header(request),
    ]
    if version is not None:
        headers.append((b"loraplex-adapter-version", b"%d" % version.version))
    return headers


def dropped_header(request: Request) -> Headers:
    """Returns the header that names fields without effect, or an empty list if there are none."""
    return [(b"loraplex-dropped", header_of(request.dropped))] if request.dropped else []
