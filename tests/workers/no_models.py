"""A loop over engines that keep their weights."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Any, NoReturn, TypeVar, cast

from memory.arena import Arena
from memory.eviction.adapter_memory import AdapterMemory
from memory.eviction.broker import MemoryBroker
from ops.reference import ReferenceOps
from workers.base_models.fetcher import ModelFetcher
from workers.base_models.loader import ModelLoader
from workers.base_models.residency import ModelResidency, ModelState
from workers.base_models.served_model import ServedModel
from workers.base_models.served_models import ServedModels
from workers.device.device_memory import HostMemory
from workers.device.weight_memory import WeightMemory
from workers.models.plan import ModelPlan
from workers.policies.queue_limits import QueueBounds
from workers.process.inbox import Inbox
from workers.process.loop import WorkerLoop
from workers.process.server import Delivery
from workers.verification.adapter_verifier import AdapterVerifier, ModelInstance
from workers.wire.status import WorkerStatus

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
    state = ModelState("model", 0, 0.0, tier="device")
    model = ServedModel(
        *(instance.engine, instance.pool, instance.report, instance.effect_proof),
        plan=cast(ModelPlan, None),
        state=state,
        make_runner=_never,
        num_bytes=0,
    )
    arena, extent_bytes = Arena(1 << 16, 1 << 16), 1 << 16
    broker = MemoryBroker(arena, AdapterMemory(arena))
    served = ServedModels(
        {},
        ModelResidency(0, clock=clock),
        WeightMemory(arena, broker, HostMemory(1, extent_bytes)),
        broker.lock,
        ModelLoader(ReferenceOps(), AT_ONCE),
        ModelFetcher(_never, thread=AT_ONCE, is_final=_never, clock=clock),
        verifier,
        host_bytes=0,
        clock=clock,
    )
    served.add(model)
    inbox = Inbox(
        served.models, bounds=bounds, memory=memory, hints=hints, deliver=deliver, clock=clock
    )
    return WorkerLoop(
        inbox,
        memory=memory,
        verifier=verifier,
        served=served,
        deliver=deliver,
        status=status,
        clock=clock,
    )


def _never(*_: Any) -> NoReturn:
    raise AssertionError("the model stays")
