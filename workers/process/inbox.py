"""Passes gateways' messages from the event loop to the engine thread."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from threading import Condition, Lock
from typing import NamedTuple

from adapters.reference import AdapterRef
from memory.accounts import Tenant
from workers.policies.queue_limits import QueueBounds
from workers.process.server import Command, Delivery, Disconnected
from workers.verification.adapter_verifier import ModelInstance
from workers.wire.frames import Abort, Desired, Drain, Prefetch, Probe, Withdraw
from workers.wire.protocol import ErrorCode, Failed, Generate

log = logging.getLogger(__name__)

MAX_TENANTS_FULL = 4
"""Limits of the whole inbox, as a multiple of the limits for the requests of one tenant."""
MAX_HINTS = 1024
"""Maximum number of adapter loads that wait in the executor `hints` to be started. If this number
is reached, a new request's adapter is loaded only once the engine thread handles the request, and a
new prefetch is dropped."""
RETRY_S = 1.0
"""Seconds after which a request that a full inbox has refused may be sent again."""


EngineCommand = Generate | Abort | Probe | Withdraw | Desired | Drain | Disconnected
"""Commands that the engine thread handles."""


class Received(NamedTuple):
    """Command of a connection, and the time when it was received."""

    connection: int
    message: EngineCommand
    received_s: float


class Inbox:
    """Messages that the event loop has received and the engine thread has not handled yet.

    A request is refused at once if its model can never run it or if the inbox is full. Otherwise
    its adapter starts to load before the engine thread handles the request, because the current
    step may take long. A separate thread starts these loads, so that the event loop never waits for
    the memory lock.
    """

    def __init__(
        self,
        models: Mapping[str, ModelInstance],
        *,
        bounds: QueueBounds,
        memory: Lock,
        hints: Executor,
        deliver: Callable[[Delivery], None],
        clock: Callable[[], float],
    ) -> None:
        """bounds: limits of each tenant's requests. memory: lock that is held while an adapter load
        is started. hints: executor that starts the loads. deliver: thread-safe; sends refusals."""
        self.models = models
        """Registered models by digest. Changed by the engine thread with the memory lock held."""
        self.is_stopped = False
        self._bounds = bounds
        self._memory = memory
        self._hints = hints
        self._deliver = deliver
        self._clock = clock
        self._changed = Condition(Lock())
        """Condition that guards messages and counts. Its lock is held for microseconds only."""
        self._messages: list[Received] = []
        self._is_woken = False
        self._num_requests = Counter[str | None]()
        self._num_tokens = Counter[str | None]()
        """Prompt tokens of the requests in `_messages` by tenant. None is the key of the total."""
        self._num_posted = Counter[str]()
        """Number of requests received for each model since the start."""
        self._num_taken = Counter[str]()
        """Number of requests for each model that the engine thread has taken since the start."""
        self._num_hints = 0

    def post(self, connection: int, message: Command) -> None:
        """Refuses the message or keeps it for `take`. Thread-safe; never waits for a step."""
        match message:
            case Generate():
                failed = self._refusal(message) or self._put_request(connection, message)
                if failed is not None:
                    self._deliver([(connection, failed)])
            case Prefetch(model=model, adapter=adapter):
                if (instance := self.models.get(model)) is not None:
                    self._hint(partial(instance.pool.prefetch, adapter))
            case _:
                with self._changed:
                    self._put(connection, message)

    def wake(self) -> None:
        """Makes `take` return even if there are no messages. Thread-safe."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def stop(self) -> None:
        """Sets `is_stopped` and ends the wait of `take`. Thread-safe."""
        self.is_stopped = True
        self.wake()

    def take(self, timeout_s: float) -> list[Received]:
        """Returns and removes all messages, after waiting at most `timeout_s` for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._is_woken, timeout_s)
            messages, self._messages, self._is_woken = self._messages, [], False
            self._num_requests.clear()
            self._num_tokens.clear()
            self._num_taken = self._num_posted.copy()
        return messages

    def _refusal(self, request: Generate) -> Failed | None:
        """Returns a failure if this worker can never run the request, and None otherwise."""
        instance = self.models.get(request.model)
        if instance is None:
            return Failed(request.id, ErrorCode.MODEL_UNKNOWN, "the worker lacks this base model")
        refusal = instance.engine.refusal(request)
        return None if refusal is None else Failed(request.id, *refusal)

    def _put_request(self, connection: int, request: Generate) -> Failed | None:
        """Keeps the request for `take`. Returns None, or a failure if the inbox is full."""
        model, bounds = request.model, self._bounds
        with self._changed:
            for tenant, factor in ((request.tenant, 1), (None, MAX_TENANTS_FULL)):
                num_requests = self._num_requests[tenant]
                num_tokens = self._num_tokens[tenant] + len(request.tokens)
                is_over = num_tokens > factor * bounds.max_tokens
                if num_requests and (is_over or num_requests >= factor * bounds.max_requests):
                    message = "the worker has received more requests than its queue may hold"
                    return Failed(request.id, ErrorCode.OVERLOADED, message, RETRY_S)
                self._num_requests[tenant] += 1
                self._num_tokens[tenant] = num_tokens
            number = self._num_posted[model]
            self._num_posted[model] += 1
            self._put(connection, request)
        if request.adapter is not None:
            tenant = Tenant(request.tenant, request.weight)
            self._hint(partial(self._expect, model, number, request.adapter, tenant))
        return None

    def _put(self, connection: int, message: EngineCommand) -> None:
        self._messages.append(Received(connection, message, self._clock()))
        self._changed.notify()

    def _hint(self, start: Callable[[], None]) -> None:
        with self._changed:
            if self._num_hints == MAX_HINTS:
                return
            self._num_hints += 1
        self._hints.submit(self._run_hint, start)

    # The methods below run on the thread of `hints`.

    def _run_hint(self, start: Callable[[], None]) -> None:
        try:
            with self._memory:
                start()
        except Exception:
            log.exception("starting to load an adapter failed")
        finally:
            with self._changed:
                self._num_hints -= 1

    def _expect(self, model: str, number: int, adapter: AdapterRef, tenant: Tenant) -> None:
        """Starts to load the adapter of a request, unless the engine thread has taken the request.
        number: number of requests for the model that were received before this request."""
        with self._changed:
            num_ahead = number - self._num_taken[model]
        if num_ahead >= 0:
            self.models[model].engine.scheduler.load_adapter(adapter, tenant, num_ahead)
