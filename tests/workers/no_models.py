"""A loop over engines that keep their weights."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Any, NoReturn, TypeVar

from memory.arena import Arena
from memory.eviction.broker import MemoryBroker
from memory.eviction.tier import Tier
from ops.reference import ReferenceOps
from workers.base_models.fetcher import ModelFetcher
from workers.base_models.loader import ModelLoader
from workers.base_models.model_pool import ModelPool
from workers.base_models.residency import ModelResidency
from workers.policies.queue_limits import QueueBounds
from workers.process.inbox import Inbox
from workers.process.loop import WorkerLoop
from workers.process.server import Delivery
from workers.verification.adapter_verifier import AdapterVerifier, ModelInstance
from workers.wire.protocol import WorkerStatus

T = TypeVar("T")


class AtOnce(Executor):
    """Runs what is submitted on the thread that submits it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


AT_ONCE = AtOnce()


def make_loop(
    instance: ModelInstance,
    memory: Lock,
    clock: Callable[[], float],
    *,
    deliver: Callable[[Delivery], None] = lambda _: None,
    status: Callable[[bool, int], WorkerStatus],
    bounds: QueueBounds = QueueBounds(),  # noqa: B008
    hints: Executor = AT_ONCE,
) -> WorkerLoop:
    """Of one model. hints: by default the thread that posts starts loads of adapters."""
    verifier = AdapterVerifier({}, clock=clock)
    inbox = Inbox(
        {"model": instance},
        bounds=bounds,
        memory=memory,
        hints=hints,
        deliver=deliver,
        clock=clock,
    )
    return WorkerLoop(
        inbox,
        memory=memory,
        verifier=verifier,
        model_pool=no_models(verifier, clock),
        deliver=deliver,
        status=status,
        clock=clock,
    )


def no_models(verifier: AdapterVerifier, clock: Callable[[], float]) -> ModelPool:
    arena = Arena(1 << 16, 1 << 16)
    return ModelPool(
        ModelResidency(0, clock=clock),
        arena,
        MemoryBroker(arena),
        ModelLoader(ReferenceOps()),
        ModelFetcher(_never, clock=clock),
        verifier,
        host=Tier(0),
        build=_never,
        clock=clock,
    )


def _never(*_: Any) -> NoReturn:
    raise AssertionError("there are no models")
