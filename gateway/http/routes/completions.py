"""Defines the routes that generate text, and `answer`, which handles all requests for workers."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from litestar.types import ASGIApp

from gateway.dialects.chat_completions import ChatCompletionRequest, ChatCompletions
from gateway.dialects.completions import CompletionRequest, Completions
from gateway.dialects.dialect import AnswerContext, AnswerFormat, Dialect
from gateway.dialects.dropped import header_of
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

B = TypeVar("B")

answering = partial(post, needs=INFERENCE, on_worker=True)
"""Declares a route whose function passes its body to `answer`."""


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
