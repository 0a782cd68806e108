"""Routes that generate text. The steps of a request are: resolve the model, tokenise, choose a
worker, reserve usage, submit, stream, settle the usage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
from litestar.params import JSONBody
from litestar.types import ASGIApp

from gateway.catalog.resolved_model import ResolvedModel
from gateway.dialects.chat_completions import ChatCompletionRequest, ChatCompletions
from gateway.dialects.completions import CompletionRequest, Completions
from gateway.dialects.dialect import AnswerFormat, BodyFormat, Dialect
from gateway.dialects.dropped import FOLDED_TURNS, UNBOUNDED_THOUGHT, header_of
from gateway.dialects.responses import Responses
from gateway.dialects.responses_fields import ResponsesRequest
from gateway.dispatch.answer_trace import outcome_of, routing_attributes, trace_answer
from gateway.dispatch.generation import Generation
from gateway.dispatch.in_flight import InFlightRequest
from gateway.dispatch.prompts import Prompt, encode_prompts
from gateway.dispatch.request_usage import RequestUsage
from gateway.dispatch.sequences import Call, check_answer_of, plan, work_of
from gateway.dispatch.token_rules import is_thought_unbounded, token_rules
from gateway.exceptions import error_type
from gateway.generation_request import GenerationRequest
from gateway.http.guards import INFERENCE, requires
from gateway.http.handlers import HotRoute
from gateway.http.request import GatewayRequest
from gateway.http.streaming import Headers, StreamResponse, WholeResponse
from gateway.limits.admission import Reservation, Usage
from gateway.quota_types import Service
from gateway.text.call_grammars import HeldGrammar, rules_of
from gateway.text.grammars import GrammarUser
from gateway.text.tokenizer import ModelTokenizer
from web.client_address import client_address
from workers.wire.client import WorkerClient
from workers.wire.protocol import ModelInfo, SamplingParams

log = logging.getLogger(__name__)

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
    request: GatewayRequest, data: JSONBody[ChatCompletionRequest]
) -> ASGIApp:
    """Answers a conversation, as one body or as a stream of server-sent events."""
    return await answer(request, CHAT_COMPLETIONS, data)


@answering("/v1/completions")
async def create_completion(request: GatewayRequest, data: JSONBody[CompletionRequest]) -> ASGIApp:
    """Continues one or many prompts, as one body or as a stream of server-sent events."""
    return await answer(request, COMPLETIONS, data)


@answering("/v1/responses")
async def create_response(request: GatewayRequest, data: JSONBody[ResponsesRequest]) -> ASGIApp:
    """Answers a conversation of items, as one response or as a stream of events. Stores nothing."""
    return await answer(request, RESPONSES, data)


async def answer(request: GatewayRequest, dialect: Dialect[B], body: B) -> ASGIApp:
    """Prepares a request and returns its response as an ASGI application. The response releases the
    request's reservations when it ends. If this function raises, it has released them itself."""
    gateway, caller = request.gateway, request.user
    asked = dialect.read(body)
    gateway.usage_recorder.check()
    target = await gateway.catalog.resolve(caller, asked.model, asked.user or caller.key.id)
    request.trace.model = asked.model
    in_flight = gateway.in_flight_requests.begin(target)
    tenant_id = caller.tenant.id
    try:
        service = gateway.catalog.current.service(tenant_id)
        full = _full_workers(request, target, service)
        if tenant_id not in gateway.refused_tenants:
            gateway.fleet.prefetch(target)
        call = await prepare(request, asked, target, service)
        admitted = await admit(call, request, full)
        gateway.refused_tenants.discard(tenant_id)
        try:
            format = partial(
                dialect.answer_format, body, call.request_id, call.tokenizer.spelling.all
            )
            return respond(request, _told(call, admitted), in_flight, admitted, format)
        except BaseException:
            gateway.admission.settle(admitted.reservation, Usage())
            raise
    except BaseException as error:
        gateway.refused_tenants.add(tenant_id)
        in_flight.end(error)
        raise


def _full_workers(
    request: GatewayRequest, target: ResolvedModel, service: Service
) -> Sequence[WorkerClient]:
    """Returns the workers whose queues have just refused a similar request. Raises WorkerFailed if
    these are all the workers that serve the model."""
    gateway, digest = request.gateway, target.base.digest
    if not len(gateway.failover.full):
        return ()
    line = digest, request.user.tenant.id, service.service_class
    return gateway.failover.full.check(gateway.fleet.serving(digest), line, request.num_bytes)


async def prepare(
    request: GatewayRequest, asked: GenerationRequest, target: ResolvedModel, service: Service
) -> Call:
    """Tokenises the request's prompts and prepares its grammar. Raises ApiError."""
    deadline = request.deadline
    request.trace.enter("tokenise")
    tokenizer = await request.gateway.tokenizers.get(target.base.digest)
    prompts = await encode_prompts(tokenizer, target, asked, request.user)
    held = await _grammar(request, asked, tokenizer, prompts[0])
    rules = await token_rules(
        asked, tokenizer, prompts[0], request.user.cache_domain, has_grammar=bool(held.grammar)
    )
    asked = with_dropped(asked, *held.dropped)
    if is_thought_unbounded(asked, tokenizer):
        asked = with_dropped(asked, UNBOUNDED_THOUGHT)
    if prompts[0].is_folded:
        asked = with_dropped(asked, FOLDED_TURNS)
    return Call(
        request_id=request.request_id,
        caller=request.user,
        asked=asked,
        target=target,
        tokenizer=tokenizer,
        prompts=prompts,
        deadline=deadline,
        num_bytes=request.num_bytes,
        trace=request.trace,
        service=service,
        grammar=held.grammar,
        rules=rules,
    )


async def _grammar(
    request: GatewayRequest, asked: GenerationRequest, tokenizer: ModelTokenizer, prompt: Prompt
) -> HeldGrammar:
    """Returns the grammar that constrains the answers, or an empty one. `prompt`: any of the
    prompts, because all have the same form."""
    grammars, caller = request.gateway.grammars, request.user
    user = GrammarUser(request.request_id, caller.tenant.id, caller.cache_domain)
    body = await grammars.of(asked.constraint, user)
    if prompt.form is None:
        return body
    rules = rules_of(asked, prompt.form, in_thought=prompt.in_thought, body=body.grammar)
    if rules is None:
        return body
    held = await grammars.of_rules(rules, tokenizer.special_id, user)
    return msgspec.structs.replace(held, dropped=held.dropped | body.dropped)


class Admitted(NamedTuple):
    worker: WorkerClient
    model: ModelInfo
    """Base model as the worker reported it when the worker was chosen."""
    reservation: Reservation


async def admit(call: Call, request: GatewayRequest, full: Sequence[WorkerClient]) -> Admitted:
    """Chooses a worker that is not in `full`, and reserves the usage that the request may have."""
    gateway, asked, target = request.gateway, call.asked, call.target
    default_tokens = target.serving.defaults.max_tokens or gateway.config.default_tokens(
        is_chat=asked.messages is not None
    )
    check_answer_of(call, default_tokens)
    work = work_of(call)
    call.trace.enter("routing")
    worker = gateway.fleet.choose(work, full)
    call.trace.annotate(partial(routing_attributes, gateway.fleet.weighed))
    model = worker.models[target.base.digest]
    call.trace.enter("limits")
    with gateway.fleet.claimed(worker, work):
        reservation = await gateway.admission.reserve(
            gateway.catalog.current,
            call.caller,
            target.base.name,
            [len(prompt.tokens) for prompt in call.prompts],
            asked_tokens=asked.max_tokens,
            default_tokens=default_tokens,
            num_choices=asked.num_choices,
            max_model_len=min(target.base.max_model_len, model.max_model_len),
        )
    return Admitted(worker, model, reservation)


def _told(call: Call, admitted: Admitted) -> Call:
    """Returns the call. Names the field of maximum tokens as dropped if fewer tokens are allowed
    than requested."""
    asked, allowed = call.asked, admitted.reservation.max_tokens
    if asked.max_tokens is None or min(allowed) >= asked.max_tokens:
        return call
    return msgspec.structs.replace(call, asked=with_dropped(asked, asked.max_tokens_param))


def respond(
    request: GatewayRequest,
    call: Call,
    in_flight: InFlightRequest,
    admitted: Admitted,
    make_format: Callable[[SamplingParams], BodyFormat],
) -> ASGIApp:
    """Returns the response. It submits the generation, sends the answer and settles the usage."""
    gateway = request.gateway
    worker, model, reservation = admitted
    call.trace.enter("stream")
    generation = plan(call, reservation, worker, model.adapter_layout, gateway.failover)
    format = make_format(generation.sampling)
    usage = RequestUsage(gateway.usage_recorder, call, reservation, request.started_at)
    gateway.running.add(call.caller.key.id, generation)

    def settle(generation: Generation, failure: Exception | None) -> None:
        gateway.running.remove(call.caller.key.id, generation)
        gateway.admission.settle(reservation, generation.usage)
        in_flight.end(failure, generation.first_output_at)
        trace_answer(call, generation, failure)
        _log(request, call, generation, failure)

    given = generation, _headers(call, generation), usage, settle
    if not (call.asked.stream and isinstance(format, AnswerFormat)):
        return WholeResponse(*given, format)
    config = gateway.config
    return StreamResponse(*given, format, config.ping_interval_s, config.slow_client_s)


def _headers(call: Call, generation: Generation) -> Headers:
    headers = [(b"loraplex-worker", generation.worker_id.encode()), *dropped_header(call.asked)]
    if call.target.version is not None:
        headers.append((b"loraplex-adapter-version", b"%d" % call.target.version.version))
    return headers


def with_dropped(asked: GenerationRequest, *names: str) -> GenerationRequest:
    """Returns the request with these names added to its fields without effect."""
    return msgspec.structs.replace(asked, dropped=tuple(sorted((*asked.dropped, *names))))


def dropped_header(asked: GenerationRequest) -> Headers:
    """Returns the header that names fields without effect. Empty if there are no such fields."""
    return [(b"loraplex-dropped", header_of(asked.dropped))] if asked.dropped else []


def _log(
    request: GatewayRequest, call: Call, generation: Generation, failure: Exception | None
) -> None:
    """Logs one line for each request, without its prompt or answer."""
    usage, version = generation.usage, call.target.version
    first_at = generation.first_output_at
    ttft_ms = None if first_at is None else round((first_at - request.started_at) * 1e3, 1)
    log.info(
        "answered",
        extra={
            "request_id": call.request_id,
            "trace_id": call.trace.trace_id,
            "tenant": call.caller.tenant.id,
            "tenant_name": call.caller.tenant.name,
            "key_id": call.caller.key.id,
            "address": client_address(request.scope),
            "model": call.asked.model,
            "adapter_version": version.version if version else None,
            "worker": generation.worker_id,
            "outcome": outcome_of(generation, failure),
            "error": failure and error_type(failure),
            "in_tok": usage.prompt_tokens,
            "out_tok": usage.completion_tokens,
            "finish_reasons": generation.finish_reasons,
            "ttft_ms": ttft_ms,
            "dur_ms": request.elapsed_ms,
        },
    )
