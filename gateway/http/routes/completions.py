"""Defines the routes that generate text, and `answer`, which handles all requests for workers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
from litestar.params import JSONBody
from litestar.types import ASGIApp

from gateway.catalog.resolved_model import ResolvedModel
from gateway.dialects.chat_completions import ChatCompletionRequest, ChatCompletions
from gateway.dialects.completions import CompletionRequest, Completions
from gateway.dialects.dialect import AnswerContext, AnswerFormat, Dialect
from gateway.dialects.dropped import header_of
from gateway.dialects.responses import Responses
from gateway.dialects.responses_fields import ResponsesRequest
from gateway.dispatch.generation import Generation
from gateway.dispatch.in_flight import InFlightRequest
from gateway.dispatch.prompts import encode_prompts
from gateway.dispatch.routing import Work
from gateway.dispatch.run import Run, check_answer_of, constraints_of
from gateway.dispatch.sequence import frames_of
from gateway.dispatch.settlement import Settlement, routing_attributes
from gateway.http.guards import INFERENCE, requires
from gateway.http.handlers import HotRoute
from gateway.http.request import HttpRequest
from gateway.http.streaming import Headers, StreamResponse, WholeResponse
from gateway.limits.admission import Reservation, Usage
from gateway.request import Request
from gateway.requests.services import Gateway
from gateway.text.grammars import GrammarUser
from web.client_address import client_address
from web.held_answer import held_answer
from workers.wire.client import WorkerClient, WorkerFailed
from workers.wire.protocol import Generate, ModelInfo

CHAT_COMPLETIONS = ChatCompletions()
COMPLETIONS = Completions()
RESPONSES = Responses()

B = TypeVar("B")

answering = partial(
    HotRoute, http_method="POST", guards=[requires(INFERENCE, on_worker=True)], status_code=200
)
"""Declares a route whose function passes its body to `answer`."""


@answering("/v1/chat/completions")
async def create_chat_completion(
    request: HttpRequest, data: JSONBody[ChatCompletionRequest]
) -> ASGIApp:
    """Answers a conversation, as one body or as a stream of server-sent events."""
    return await answer(request, CHAT_COMPLETIONS, data)


@answering("/v1/completions")
async def create_completion(request: HttpRequest, data: JSONBody[CompletionRequest]) -> ASGIApp:
    """Continues one or many prompts, as one body or as a stream of server-sent events."""
    return await answer(request, COMPLETIONS, data)


@answering("/v1/responses")
async def create_response(request: HttpRequest, data: JSONBody[ResponsesRequest]) -> ASGIApp:
    """Answers a conversation of items, as one response or as a stream of events. Stores nothing."""
    return await answer(request, RESPONSES, data)


async def answer(http: HttpRequest, dialect: Dialect[B], body: B) -> ASGIApp:
    """Prepares the answer to a request and returns it as an ASGI application, which has sent
    nothing yet. The application settles the request when it ends. If this function raises, it has
    released everything that the request held."""
    gateway, caller = http.gateway, http.user
    request = with_dropped(dialect.read(body), *http.dropped)
    target = await gateway.catalog.resolve(caller, request.model, request.user or caller.key.id)
    http.trace.model = request.model
    if not request.stream:
        held_answer(http.scope).refuse_if_full()
    full_workers = refuse_early(http, target)
    in_flight = gateway.in_flight_requests.begin(target, caller.key.id)
    try:
        if not gateway.refusals.was_refused(caller.tenant.id):
            gateway.fleet.prefetch(target)
        run = await prepare(http, request, target)
        admitted = await admit(http, run, full_workers)
        gateway.refusals.note_newest(caller.tenant.id, is_refused=False)
        try:
            return respond(gateway, run, in_flight, admitted, dialect, body)
        except BaseException:
            gateway.admission.settle(admitted.reservation, Usage())
            raise
    except BaseException as error:
        gateway.refusals.note_newest(caller.tenant.id, is_refused=True)
        in_flight.end(error)
        raise


def refuse_early(http: HttpRequest, target: ResolvedModel) -> Sequence[WorkerClient]:
    """Refuses a request before its prompt is read if its usage could not be recorded, or if all
    workers that serve the model have just refused a similar request. Otherwise returns the workers
    that have just refused a similar request. Raises UsageUnavailable or WorkerFailed."""
    gateway, digest, tenant_id = http.gateway, target.base.digest, http.user.tenant.id
    gateway.wal.refuse_if_unavailable()
    full_queues = gateway.failover.full
    if not full_queues:
        return ()
    line = digest, tenant_id, http.user.service.service_class
    try:
        return full_queues.check(gateway.fleet.serving(digest), line, http.num_bytes)
    except WorkerFailed:
        gateway.refusals.note_newest(tenant_id, is_refused=True)
        raise


async def prepare(http: HttpRequest, request: Request, target: ResolvedModel) -> Run:
    """Tokenises the request's prompts and prepares its constraints. Raises ApiError."""
    gateway, caller, deadline = http.gateway, http.user, http.deadline
    http.trace.enter("tokenise")
    tokenizer = await gateway.tokenizers.get(target.base.digest)
    prompts = await encode_prompts(tokenizer, target, request, caller)
    user = GrammarUser(http.request_id, caller.tenant.id, caller.cache_domain)
    constraints = await constraints_of(request, tokenizer, prompts[0], gateway.grammars, user)
    dropped = [*constraints.dropped, *([prompts[0].change] if prompts[0].change else [])]
    return Run(
        request_id=http.request_id,
        caller=caller,
        request=with_dropped(request, *dropped),
        target=target,
        tokenizer=tokenizer,
        prompts=prompts,
        deadline=deadline,
        num_bytes=http.num_bytes,
        started_at=http.started_at,
        address=client_address(http.scope),
        trace=http.trace,
        grammar=constraints.grammar,
        rules=constraints.rules,
    )


class Admitted(NamedTuple):
    frames: list[Generate]
    worker: WorkerClient
    model: ModelInfo
    """Base model as the worker reported it when the worker was chosen."""
    reservation: Reservation


async def admit(http: HttpRequest, run: Run, full_workers: Sequence[WorkerClient]) -> Admitted:
    """Chooses a worker that is not in `full_workers`, and reserves the request's maximum usage, and
    memory for its answer unless it is streamed."""
    gateway, request, target = http.gateway, run.request, run.target
    config, is_chat = gateway.config, request.messages is not None
    default_tokens = config.default_chat_tokens if is_chat else config.default_completion_tokens
    default_tokens = target.serving.defaults.max_tokens or default_tokens
    size = check_answer_of(run, default_tokens)
    if not request.stream:
        held_answer(http.scope).reserve(size.num_bytes)
    frames = await frames_of(run)
    work = Work.of(frames, request.num_choices)
    run.trace.enter("routing")
    worker = gateway.fleet.choose(work, full_workers)
    run.trace.annotate(partial(routing_attributes, gateway.fleet.weighed))
    model = worker.models[target.base.digest]
    run.trace.enter("limits")
    with gateway.fleet.claimed(worker, work):
        reservation = await gateway.admission.reserve(
            run.caller,
            target.price,
            [len(prompt.tokens) for prompt in run.prompts],
            asked_tokens=request.max_tokens,
            default_tokens=default_tokens,
            num_choices=request.num_choices,
            max_model_len=min(target.base.max_model_len, model.max_model_len),
        )
    return Admitted(frames, worker, model, reservation)


def respond(
    gateway: Gateway,
    run: Run,
    in_flight: InFlightRequest,
    admitted: Admitted,
    dialect: Dialect[B],
    body: B,
) -> ASGIApp:
    """Returns a response that runs the generation, sends the answer and settles the request."""
    frames, worker, model, reservation = admitted
    run.trace.enter("stream")
    generation = Generation(
        run, frames, reservation, worker, model.adapter_layout, gateway.failover
    )
    context = AnswerContext(run.request_id, run.tokenizer.spelling.all, generation.sampling)
    format = dialect.answer_format(body, context)
    headers = _headers(run, reservation, generation)
    settlement = Settlement(
        run,
        generation,
        reservation,
        wal=gateway.wal,
        admission=gateway.admission,
        in_flight=in_flight,
    )
    in_flight.generation = generation
    if not (run.request.stream and isinstance(format, AnswerFormat)):
        return WholeResponse(generation, headers, settlement, format)
    return StreamResponse(generation, headers, settlement, format, gateway.config.ping_interval_s)


def _headers(run: Run, reservation: Reservation, generation: Generation) -> Headers:
    request, version = run.request, run.target.version
    if request.max_tokens is not None and min(reservation.max_tokens) < request.max_tokens:
        request = with_dropped(request, request.max_tokens_param)
    headers = [
        (b"loraplex-worker", generation.worker_id.encode()),
        *dropped_header(request),
    ]
    if version is not None:
        headers.append((b"loraplex-adapter-version", b"%d" % version.version))
    return headers


def with_dropped(request: Request, *names: str) -> Request:
    """Returns the request with these names added to its fields without effect."""
    if not names:
        return request
    return msgspec.structs.replace(request, dropped=tuple(sorted((*request.dropped, *names))))


def dropped_header(request: Request) -> Headers:
    """Returns the header that names fields without effect, or an empty list if there are none."""
    return [(b"loraplex-dropped", header_of(request.dropped))] if request.dropped else []
