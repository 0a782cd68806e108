"""Builds a worker from its configuration: the models, their shared arena, and the engine loop."""

from __future__ import annotations

import logging
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from heapq import nlargest
from operator import itemgetter

import torch

import ops.registry
from adapters.pool.host import HostTier
from adapters.pool.host_slab import HostSlab
from adapters.pool.image import ImageCache
from adapters.pool.loader import LoaderThreads
from adapters.store.opening import open_store
from memory.reuse import ReuseByKey
from ops.base import Ops
from ops.processor import quota_cores
from workers.base_models.fetcher import ModelFetcher
from workers.base_models.loader import ModelLoader
from workers.base_models.residency import ModelResidency
from workers.base_models.served_model import ServedModel
from workers.base_models.served_models import ServedModels
from workers.constraints.sequence_grammar import GrammarThreads
from workers.device.cuda_memory import CudaVirtualMemory
from workers.device.virtual_memory import VirtualMemory
from workers.device.weight_memory import WeightMemory
from workers.execution.engine import Engine
from workers.execution.model_runner import ModelRunner
from workers.execution.speed import measure_speed
from workers.execution.warm_up import warm_up_runner
from workers.models.spec import UnsupportedModel
from workers.observe.adapter_list import list_adapters
from workers.observe.ring import StepRing
from workers.policies.queue_limits import QueueBounds
from workers.process.config import WorkerConfig
from workers.process.errors import CannotServe, CannotServeModel
from workers.process.inbox import Inbox
from workers.process.loop import WorkerLoop
from workers.process.machine import settled
from workers.process.memory_plan import Footprint
from workers.process.model_builder import ModelBuilder, buffer_bytes, read_plan
from workers.process.server import Delivery
from workers.process.warm_up import warm_up
from workers.process.worker_memory import WorkerMemory
from workers.verification.adapter_verifier import AdapterVerifier
from workers.wire.status import TenantStatus, WorkerStatus

log = logging.getLogger(__name__)

ModelProgress = Callable[[str, int, int], None]
"""Function that receives a loading model's name, its bytes loaded so far and its total bytes."""

MAX_TENANTS = 100
"""Maximum number of tenants in a `WorkerStatus`, which lists the tenants with the most bytes."""
SLAB_MARGIN = 8


class Worker:
    """All parts of one worker process, built and warmed up."""

    runner: type[ModelRunner] = ModelRunner

    def __init__(self, config: WorkerConfig, *, instance_id: str, progress: ModelProgress) -> None:
        """Loads the configured models to the device, in their order, except models for which there
        is no room left. Raises CannotServe, and the errors of `load_model`."""
        self.config = config = settled(config)
        self.instance_id = instance_id
        self.ring = StepRing()
        self.ops = self._select_ops()
        try:
            store = open_store(config.store, config.cache_dir / "store")
        except OSError as error:
            why = f"the store {config.store} cannot be opened: {error.strerror}"
            raise CannotServe(why) from error
        names = {digest: name for name, digest in config.models.items()}
        plans = {digest: read_plan(config, store, digest) for digest in names}
        virtual = self._virtual_memory()
        buffers = [buffer_bytes(config, p, uses_graphs=self.uses_graphs) for p in plans.values()]
        self.memory = WorkerMemory(
            config,
            [Footprint(p.kv_layout.page_bytes, p.max_bytes(self.ops)) for p in plans.values()],
            virtual,
            buffer_bytes=0 if virtual is None else sum(buffers),
        )
        arena, broker = self.memory.arena, self.memory.broker
        self._inbox: Inbox | None = None
        """Inbox of the loop. None until `make_loop` is called."""
        self._closing = ExitStack()
        """Callbacks with which `close` ends the worker's threads."""
        self.instances: dict[str, ServedModel] = {}
        self.verifier = AdapterVerifier(self.instances, clock=time.monotonic)
        residency = ModelResidency(
            arena.num_kv_extents,
            clock=time.monotonic,
            max_wait_s=config.max_model_wait_s,
            max_drain_s=config.max_model_drain_s,
        )
        requests = ReuseByKey(time.monotonic)
        self._builder = builder = ModelBuilder(
            config=config,
            bounds=QueueBounds(config.max_queued, config.max_queued_tokens, config.max_queue_wait),
            ops=self.ops,
            store=store,
            memory=self.memory,
            residency=residency,
            host_tier=HostTier(
                config.host_adapter_memory, broker.bytes_held.accounts, clock=time.monotonic
            ),
            host_slab=None if virtual is None else _make_slab(config, virtual),
            image_cache=ImageCache(config.cache_dir, config.adapter_cache, requests.expected),
            adapter_requests=requests,
            grammar_threads=GrammarThreads(self._notify),
            ring=self.ring,
            notify=self._notify,
            runner=self.runner,
            runs_ahead=self.runs_ahead,
            uses_graphs=self.uses_graphs,
        )
        self._closing.callback(builder.grammar_threads.close)
        self.served = ServedModels(
            self.instances,
            residency,
            WeightMemory(arena, broker, self.memory.device),
            broker.lock,
            ModelLoader(self.ops, self._thread("model-loader")),
            ModelFetcher(
                lambda digest, name: builder.build(name, read_plan(config, store, digest)),
                thread=self._thread("model-fetcher"),
                is_final=lambda error: isinstance(error, UnsupportedModel | CannotServe),
                clock=time.monotonic,
            ),
            self.verifier,
            host_bytes=config.host_model_memory or sys.maxsize,
            clock=time.monotonic,
        )
        for digest, plan in plans.items():
            try:
                self.served.add(builder.build(names[digest], plan))
            except CannotServeModel as error:
                raise CannotServe(f"model {names[digest]}: {error}") from error
        for digest, name in names.items():
            if (runner := self.served.load_now(digest, partial(progress, name))) is not None:
                self._warm_up(self.instances[digest].engine, runner)
        self._num_compiled = self.ops.num_compiled

    def close(self) -> None:
        """Closes models and threads, and drops queued loads. Called after the loop has ended."""
        self._closing.close()
        for model in self.instances.values():
            model.close()

    def remove_deleted_images(self) -> None:
        """Removes the files of packed images whose adapters are deleted from the store. Raises
        OSError if the store does not answer. Thread-safe."""
        exists = partial(self._builder.store.exists, "adapters")
        self._builder.image_cache.remove_deleted(exists)

    def make_loop(self, deliver: Callable[[Delivery], None]) -> WorkerLoop:
        """Returns the loop that runs the engines. Called once."""
        inbox = self._inbox = Inbox(
            self.instances,
            bounds=self._builder.bounds,
            memory=self.memory.broker.lock,
            hints=self._thread("adapter-hints"),
            deliver=deliver,
            clock=time.monotonic,
        )
        return WorkerLoop(
            inbox,
            memory=self.memory.broker.lock,
            verifier=self.verifier,
            served=self.served,
            deliver=deliver,
            status=self.status,
            clock=time.monotonic,
        )

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is scheduled while the previous step is computed."""
        return self.ops.device.type == "cuda"

    @property
    def uses_graphs(self) -> bool:
        """Whether steps with few tokens run as captured CUDA graphs (`GraphRunner`)."""
        return self.ops.device.type == "cuda"

    def _select_ops(self) -> Ops:
        cores = min(torch.get_num_threads(), quota_cores() or sys.maxsize)
        name, num_threads = self.config.ops, self.config.threads or cores
        torch.set_num_threads(num_threads)
        variant = self.config.kernel_variant or None
        log.info(
            *("op backend %s, kernels %s, %d threads at most, pid %d", name, variant or "default"),
            *(num_threads, os.getpid()),
        )
        match name:
            case "cuda":
                return ops.registry.select(name, cache_dir=self.config.cache_dir / "kernels")
            case "cpu":
                return ops.registry.select(name, variant=variant)
            case _:
                return ops.registry.select(name)

    def _warm_up(self, engine: Engine, runner: ModelRunner) -> None:
        """Warms up a model loaded at start-up. A model loaded later compiles its kernels and
        captures its graphs during its first steps."""
        try:
            warm_up_runner(runner, self.config.max_lora_rank, self.config.max_batched_tokens)
            warm_up(engine)
            measure_speed(engine, time.monotonic)
        except CannotServe:
            raise
        except Exception as error:
            log.exception("a warm-up step failed", exc_info=error)
            raise CannotServe(f"a warm-up step failed: {error}") from error

    def _virtual_memory(self) -> VirtualMemory | None:
        """Returns the device's virtual memory, to which packed weights are copied from the host.
        Returns None on a CPU, where each load of weights reads files into ordinary memory."""
        return CudaVirtualMemory.of(self.ops.device) if self.ops.device.type == "cuda" else None

    def status(self, draining: bool, generation: int) -> WorkerStatus:
        """Returns the current status. Called on the engine thread only."""
        instances, arena = self.instances.values(), self.memory.arena
        held, adapters = arena.bytes_held.held, self.memory.adapters.held_bytes()
        num_cached, cached_bytes = self._builder.image_cache.held
        listed = list_adapters([each.pool for each in instances], self._builder.host_tier)
        return WorkerStatus(
            instance_id=self.instance_id,
            draining=draining,
            models=self.served.status(),
            adapters=listed.adapters,
            num_unlisted_adapters=listed.num_unlisted,
            adapter_counts=listed.counts,
            adapter_bytes=listed.num_bytes,
            arena_bytes=arena.num_bytes + arena.num_beside * arena.extent_bytes,
            extents=arena.map(),
            settings=self.config.effective(),
            step=self.ring.num_steps,
            tokens_per_s=_tokens_per_s(self.ring),
            generation=generation,
            num_late_kernels=self.ops.num_compiled - self._num_compiled,
            num_cached_adapters=num_cached,
            cached_adapter_bytes=cached_bytes,
            tenants=[
                TenantStatus(tenant, num_bytes - adapters[tenant], adapters[tenant])
                for tenant, num_bytes in nlargest(MAX_TENANTS, held.items(), key=itemgetter(1))
            ],
        )

    def _notify(self) -> None:
        """Wakes the loop, because a load has ended. Thread-safe."""
        if self._inbox is not None:
            self._inbox.wake()

    def _thread(self, name: str) -> Executor:
        """Returns an executor of one thread that ends when the worker is closed."""
        thread = LoaderThreads(name, self._notify)
        self._closing.callback(thread.shutdown, wait=False, cancel_futures=True)
        return thread


def _tokens_per_s(ring: StepRing) -> float:
    """Returns the generated tokens per second in the last ten seconds."""
    recent = ring.last()
    recent = recent[recent["start_s"] > time.monotonic() - 10.0]
    if len(recent) < 2:
        return 0.0
    return float(recent["num_sampled"].sum() / max(time.monotonic() - recent["start_s"][0], 1e-9))


def _make_slab(config: WorkerConfig, virtual: VirtualMemory) -> HostSlab:
    """Allocates pinned host memory for adapter images, with a margin for a new image that is loaded
    before other images are dropped."""
    num_bytes = config.host_adapter_memory + config.host_adapter_memory // SLAB_MARGIN
    pages = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, pages), dtype=torch.uint8)
    virtual.pin(memory)
    return HostSlab(memory.numpy())
