"""Runs one request of a caller, from its model's name to its generation, and releases what it
holds. Knows nothing of HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Self

from gateway.catalog.catalog import Principal
from gateway.catalog.resolved_model import ResolvedModel
from gateway.dispatch.generation import Generation
from gateway.dispatch.in_flight import InFlightRequest
from gateway.dispatch.prompts import encode_prompts
from gateway.dispatch.run import Run, Work, check_answer_of, constraints_of, frames_of
from gateway.dispatch.settlement import Settlement, routing_attributes
from gateway.limits.admission import RequestCharge, Reservation, Usage
from gateway.request import Request
from gateway.requests.services import Gateway
from gateway.text.grammars import GrammarUser
from gateway.tracing import Untraced
from web.held_bytes import HeldAnswer
from workers.wire.client import HUNG_STEP_S, WorkerClient

log = logging.getLogger(__name__)

LAST_REPORT_S = HUNG_STEP_S
"""Maximum seconds that the settlement of an ended answer waits for reports by connected workers."""


class RequestScope:
    """Context of one request, which ends with the request. It owns the charge, the trace, the
    in-flight count, the generation, the reservation and the settlement. Each is released by a
    function that was given to `hold`. These functions are called once, the newest first, however
    the request ends. The server releases the memory of the body and of the answer.
    """

    def __init__(
        self,
        gateway: Gateway,
        request_id: str,
        *,
        started_at: float,
        answer: HeldAnswer,
        trace: Untraced,
        address: str | None = None,
    ) -> None:
        """`started_at` is the time of time.perf_counter() at which the request arrived. `address`
        is the client's, for the log."""
        self.gateway = gateway
        self.request_id = request_id
        self.started_at = started_at
        self.deadline = started_at + gateway.config.request_timeout_s
        """Time of time.perf_counter() by which the first output is due."""
        self.body = answer.body
        self.num_bytes = 0
        """Size of the body in bytes, once it is read."""
        self.answer = answer
        self.trace = trace
        self.address = address
        self.caller: Principal
        """Caller of the request. Set by `begin`."""
        self.failure: Exception | None = None
        """Exception that ended the request. None if it was answered or its client disconnected."""
        self.generation: Generation | None = None
        self._held: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, Exception):
            self.failure = error
        while self._held:
            try:
                self._held.pop()()
            except Exception:
                log.exception("something that a request held was not released")

    def hold(self, release: Callable[[], object]) -> None:
        """Calls `release` when the request ends."""
        self._held.append(release)

    def begin(self, caller: Principal) -> RequestCharge:
        """Sets the caller, who owns the body and the trace from now on. Returns the charge of the
        request, which is not taken yet. Raises QuotaUnavailable."""
        self.caller = caller
        self.trace.tenant = caller.tenant
        self.body.charge(caller.tenant.id)
        charge = self.gateway.admission.charge(caller, self.body)
        self.hold(charge.end)
        return charge

    async def start(self, request: Request) -> Started:
        """Chooses a worker and reserves the limits of a request. The first `Generation.step` sends
        it. Raises ApiError or WorkerFailed."""
        gateway, caller = self.gateway, self.caller
        subject = request.user or caller.who.id
        target = await gateway.catalog.resolve(caller, request.model, subject)
        self.trace.model = request.model
        if not request.stream:
            self.answer.refuse_if_full()
        gateway.wal.refuse_if_unavailable()
        is_refused = True
        try:
            full = self._full_workers(target)
            in_flight = InFlightRequest(gateway.in_flight_requests, target, caller.who.id)
            self.hold(lambda: in_flight.end(self.failure))
            if not gateway.refusals.was_refused(caller.tenant.id):
                gateway.fleet.prefetch(target)
            run = await self._prepare(request, target)
            started = await self._admit(run, full)
            in_flight.generation = started.generation
            is_refused = False
        finally:
            gateway.refusals.note_newest(caller.tenant.id, is_refused=is_refused)
        return started

    async def await_reports(self) -> None:
        """Waits until the workers have reported how much of the ended generation they computed,
        which may take another step. A request that fails is billed for that step too."""
        if self.generation is not None:
            await self.generation.stop(LAST_REPORT_S)

    def _full_workers(self, target: ResolvedModel) -> Sequence[WorkerClient]:
        """Returns the workers that have just refused a similar request. Raises WorkerFailed if all
        workers that serve the model have."""
        full_queues, digest = self.gateway.failover.full, target.base.digest
        if not full_queues:
            return ()
        line = digest, self.caller.tenant.id, self.caller.service.service_class
        return full_queues.check(self.gateway.fleet.serving(digest), line, self.num_bytes)

    async def _prepare(self, request: Request, target: ResolvedModel) -> Run:
        """Tokenises the request's prompts and prepares its constraints. Raises ApiError."""
        gateway, caller = self.gateway, self.caller
        self.trace.enter("tokenise")
        tokenizer = await gateway.tokenizers.get(target.base.digest)
        prompts = await encode_prompts(tokenizer, target, request, caller)
        user = GrammarUser(self.request_id, caller.tenant.id, caller.cache_domain)
        constraints = await constraints_of(request, tokenizer, prompts[0], gateway.grammars, user)
        dropped = [*constraints.dropped, *([prompts[0].change] if prompts[0].change else [])]
        return Run(
            request_id=self.request_id,
            caller=caller,
            request=request.with_dropped(*dropped),
            target=target,
            tokenizer=tokenizer,
            prompts=prompts,
            deadline=self.deadline,
            num_bytes=self.num_bytes,
            started_at=self.started_at,
            address=self.address,
            trace=self.trace,
            grammar=constraints.grammar,
            rules=constraints.rules,
        )

    async def _admit(self, run: Run, full: Sequence[WorkerClient]) -> Started:
        """Chooses a worker that is not in `full`, and reserves the request's maximum usage, and
        memory for its answer unless it is streamed."""
        gateway, request, target = self.gateway, run.request, run.target
        config, is_chat = gateway.config, request.messages is not None
        default_tokens = config.default_chat_tokens if is_chat else config.default_completion_tokens
        default_tokens = target.serving.defaults.max_tokens or default_tokens
        size = check_answer_of(run, default_tokens)
        if not request.stream:
            self.answer.reserve(size.num_bytes)
        frames = await frames_of(run)
        work = Work.of(frames, request.num_choices)
        self.trace.enter("routing")
        worker = gateway.fleet.choose(work, full)
        self.trace.annotate(partial(routing_attributes, gateway.fleet.weighed))
        model = worker.models[target.base.digest]
        self.trace.enter("limits")
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
        self.hold(lambda: gateway.admission.settle(reservation, self._usage))
        self.trace.enter("stream")
        generation = self.generation = Generation(
            run, frames, reservation, worker, model.adapter_layout, gateway.failover
        )
        settlement = Settlement(run, generation, reservation, gateway.wal)
        self.hold(lambda: settlement.settle(self.failure))
        self.hold(generation.cancel)
        return Started(run, generation, reservation, settlement)

    @property
    def _usage(self) -> Usage:
        return Usage() if self.generation is None else self.generation.usage


class Started(NamedTuple):
    """Request that has been admitted. Its scope settles it."""

    run: Run
    generation: Generation
    reservation: Reservation
    settlement: Settlement
    """Settlement, whose `keep` may be called to record the usage before the request ends."""
