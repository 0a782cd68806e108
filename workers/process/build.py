"""Composition of a worker: from a configuration to a loop of engines that share one arena."""

from __future__ import annotations

import logging
import mmap
import os
import sys
import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from functools import partial
from heapq import nlargest
from operator import itemgetter
from threading import Lock

import torch

import ops.registry
from adapters.pool.device import DeviceTier
from adapters.pool.host import HostTier
from adapters.pool.host_slab import HostSlab
from adapters.pool.image import ImageCache
from adapters.pool.loader import AdapterLoader, LoaderThread
from adapters.pool.loads import Loads
from adapters.pool.pool import AdapterPool
from adapters.store.opening import open_store
from memory.arena import Arena
from memory.eviction.adapter_memory import UNIT_BYTES, AdapterMemory
from memory.eviction.broker import MemoryBroker
from memory.eviction.tier import Tier
from memory.kv_cache import KVCache
from memory.reuse import ReuseByKey
from ops.base import AdapterTables, Ops
from ops.processor import quota_cores
from telemetry import engine_metrics
from workers.base_models.fetcher import ModelFetcher
from workers.base_models.loader import ModelLoader
from workers.base_models.residency import ModelResidency, ModelState
from workers.base_models.served_model import ServedModel
from workers.base_models.served_models import ServedModels
from workers.constraints.grammars import Grammars
from workers.constraints.request_constraints import RequestConstraints
from workers.constraints.sequence_grammar import GrammarThreads
from workers.device.cuda_memory import CudaVirtualMemory
from workers.device.device_memory import DeviceMemory, HostMemory, MappedMemory, gib
from workers.device.virtual_memory import VirtualMemory
from workers.device.weight_image import WeightImage
from workers.device.weight_memory import WeightMemory
from workers.execution.batch import TokenBuffer
from workers.execution.engine import Engine
from workers.execution.graph_runner import GraphRunner, Limits
from workers.execution.model_runner import ModelRunner
from workers.execution.speed import measure_speed
from workers.execution.warm_up import warm_up_runner
from workers.models.loading import LoadedModel
from workers.models.plan import ModelPlan
from workers.models.spec import UnsupportedModel
from workers.observe.report import EngineReport
from workers.observe.ring import StepRing
from workers.policies.fair_scheduler import fair_scheduler
from workers.policies.queue_limits import QueueBounds
from workers.process.config import WorkerConfig
from workers.process.errors import CannotServe, CannotServeModel
from workers.process.inbox import Inbox
from workers.process.loop import WorkerLoop
from workers.process.machine import settled
from workers.process.memory_plan import Footprint, MemoryPlan, plan_memory, setting
from workers.process.server import Delivery
from workers.process.warm_up import warm_up
from workers.verification.adapter_verifier import AdapterVerifier
from workers.verification.effect_proof import EffectProof
from workers.wire.protocol import (
    ModelInfo,
    TenantStatus,
    WorkerStatus,
)

log = logging.getLogger(__name__)

LOAD_BYTES_PER_S = 1e9
"""Assumed bytes per second of a model's load until it is measured."""
ModelProgress = Callable[[str, int, int], None]
"""Function called with the name of the model that loads, the bytes done and the total bytes."""

MAX_TENANTS = 100
"""Maximum number of tenants in a `WorkerStatus`."""
SLAB_MARGIN = 8


class Worker:
    """All parts of one worker process, built and warmed up."""

    runner: type[ModelRunner] = ModelRunner

    def __init__(self, config: WorkerConfig, *, instance_id: str, progress: ModelProgress) -> None:
        """Loads models to the device in the order of the configuration, if there is room for them.
        Raises CannotServe, and the errors of `load_model`."""
        self.config = config = settled(config)
        self.instance_id = instance_id
        self.ring = StepRing()
        self.ops = self._select_ops()
        try:
            self.store = open_store(config.store, config.cache_dir / "store")
        except OSError as error:
            why = f"the store {config.store} cannot be opened: {error.strerror}"
            raise CannotServe(why) from error
        names = {digest: name for name, digest in config.models.items()}
        plans = {digest: self._read_plan(digest) for digest in names}
        virtual = self._virtual_memory()
        graphs = [_graph_limits(config, p) for p in plans.values()] if self.uses_graphs else []
        self._plan = plan_memory(
            config,
            [Footprint(p.kv_layout.page_bytes, p.max_bytes(self.ops)) for p in plans.values()],
            granularity=UNIT_BYTES if virtual is None else max(UNIT_BYTES, virtual.granularity),
            graph_bytes=sum(limits.num_bytes for limits in graphs),
        )
        self.arena = _make_arena(config, self._plan)
        sizes = (self.arena.num_extents, self.arena.extent_bytes)
        try:
            self._device_memory: DeviceMemory = (
                HostMemory(*sizes) if virtual is None else MappedMemory(virtual, *sizes)
            )
        except (OSError, OverflowError) as error:
            raise CannotServe(
                f"{setting(config)}: this machine gives no {self.arena.num_bytes} bytes: {error}"
            ) from error
        self.memory = self._device_memory.tensor
        self.adapter_memory = AdapterMemory(self.arena)
        self.broker = MemoryBroker(self.arena, self.adapter_memory)
        self._host_tier = HostTier(config.host_adapter_memory, self.broker.bytes_held.accounts)
        self._host_slab = None if virtual is None else _make_slab(config, virtual)
        self._adapter_requests = ReuseByKey(time.monotonic)
        self._image_cache = ImageCache(
            config.cache_dir,
            config.adapter_cache,
            self._adapter_requests.expected,
        )
        self._inbox: Inbox | None = None
        """None until `make_loop` is called."""
        self._closing = ExitStack()
        """Callbacks that close the worker's threads."""
        self._grammar_threads = GrammarThreads(self._notify)
        self._closing.callback(self._grammar_threads.close)
        self.instances: dict[str, ServedModel] = {}
        self.verifier = AdapterVerifier(self.instances, clock=time.monotonic)
        self._residency = ModelResidency(
            self.arena.num_kv_extents,
            clock=time.monotonic,
            max_wait_s=config.max_model_wait_s,
            max_drain_s=config.max_model_drain_s,
        )
        self.served = ServedModels(
            self.instances,
            self._residency,
            WeightMemory(self.arena, self.broker, self._device_memory),
            self.broker.lock,
            ModelLoader(self.ops, self._thread("model-loader")),
            ModelFetcher(
                lambda digest, name: self.build_model(name, self._read_plan(digest)),
                thread=self._thread("model-fetcher"),
                is_final=lambda error: isinstance(error, UnsupportedModel | CannotServe),
                clock=time.monotonic,
            ),
            self.verifier,
            host=Tier(config.host_model_memory or sys.maxsize),
            clock=time.monotonic,
        )
        for digest, plan in plans.items():
            try:
                self.served.add(self.build_model(names[digest], plan))
            except CannotServeModel as error:
                raise CannotServe(f"model {names[digest]}: {error}") from error
        for digest, name in names.items():
            if self.served.load_now(digest, partial(progress, name)):
                self._warm_up(digest)
        self._num_compiled = self.ops.num_compiled

    def close(self) -> None:
        """Closes models and threads, dropping queued loads. Called after the loop has ended."""
        self._closing.close()
        for model in self.instances.values():
            model.close()

    def remove_deleted_images(self) -> None:
        """Removes the files of packed images whose adapters are deleted from the store. Raises
        OSError if the store does not answer. Thread-safe."""
        self._image_cache.remove_deleted(partial(self.store.exists, "adapters"))

    def make_loop(self, deliver: Callable[[Delivery], None]) -> WorkerLoop:
        """Returns the loop that runs the engines. Called once."""
        inbox = self._inbox = Inbox(
            self.instances,
            bounds=_queue_bounds(self.config),
            memory=self.broker.lock,
            hints=self._thread("adapter-hints"),
            deliver=deliver,
            clock=time.monotonic,
        )
        return WorkerLoop(
            inbox,
            memory=self.broker.lock,
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
        """Whether steps of few tokens run as captured graphs (`GraphRunner`)."""
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

    def _warm_up(self, digest: str) -> None:
        """Warms up a model loaded at start-up. A model loaded later compiles its kernels and
        captures its graphs during its first steps."""
        engine = self.instances[digest].engine
        assert isinstance(engine.runner, ModelRunner)
        try:
            warm_up_runner(engine.runner, self.config.max_lora_rank, self.config.max_batched_tokens)
            warm_up(engine)
            measure_speed(engine, time.monotonic)
        except CannotServe:
            raise
        except Exception as error:
            log.exception("a warm-up step failed", exc_info=error)
            raise CannotServe(f"a warm-up step failed: {error}") from error

    def _virtual_memory(self) -> VirtualMemory | None:
        """Returns virtual memory, at whose addresses packed weights are copied from the host. None
        if each load of weights reads files into ordinary memory (CPU)."""
        return CudaVirtualMemory.of(self.ops.device) if self.ops.device.type == "cuda" else None

    def status(self, draining: bool, generation: int) -> WorkerStatus:
        """Returns the current status. Called on the engine thread only."""
        instances = self.instances.values()
        held, adapters = self.arena.bytes_held.held, self.adapter_memory.held_bytes()
        num_cached, cached_bytes = self._image_cache.held
        return WorkerStatus(
            instance_id=self.instance_id,
            draining=draining,
            models=self.served.status(),
            adapters=[adapter for each in instances for adapter in each.report.adapters()],
            arena_bytes=self.arena.num_bytes + self.arena.num_beside * self.arena.extent_bytes,
            extents=self.arena.map(),
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

    def _read_plan(self, digest: str) -> ModelPlan:
        """Fetches the model unless it is on this machine, and returns its plan. Thread-safe."""
        folder, dtype = self.store.model_folder(digest), getattr(torch, self.config.dtype)
        return ModelPlan.read(folder, digest, dtype, self.config.max_model_len)

    def _notify(self) -> None:
        """Wakes the loop, because a load has ended. Thread-safe."""
        if self._inbox is not None:
            self._inbox.wake()

    def _thread(self, name: str) -> Executor:
        """Returns an executor of one thread that ends when the worker is closed."""
        thread = LoaderThread(name, self._notify)
        self._closing.callback(thread.shutdown, wait=False, cancel_futures=True)
        return thread

    def build_model(self, name: str, plan: ModelPlan) -> ServedModel:
        """Builds everything that the model needs except its weights. Called on any thread without
        the memory lock. If it raises CannotServe, OSError or MemoryError, nothing is left behind.
        """
        with ExitStack() as closing:
            model = self._build_model(name, plan, closing)
            model.closing = closing.pop_all()
        return model

    def _build_model(self, name: str, plan: ModelPlan, closing: ExitStack) -> ServedModel:
        """closing: receives the callbacks that free the model's parts."""
        config, digest, lock = self.config, plan.digest, self.broker.lock
        weight_bytes = plan.max_bytes(self.ops)
        num_extents = -(-weight_bytes // self.arena.extent_bytes)
        max_kv_extents = self._check(plan, num_extents)
        with _sized_by("max_num_seqs", config.max_num_seqs):
            buffer = TokenBuffer(config.max_num_seqs, plan.max_model_len, self.ops.device)
        # The garbage collector may free the engine, which references the buffer, much later.
        closing.callback(setattr, buffer, "tokens", buffer.tokens.new_empty(0))
        with _sized_by("max_loaded_adapters", config.max_loaded_adapters):
            device = DeviceTier(
                *(self.memory, self.adapter_memory, self.broker),
                ops=self.ops,
                shape=plan.shape,
                num_slots=config.max_loaded_adapters,
                clock=time.monotonic,
            )
        with lock:
            closing.callback(_under(lock, self.broker.add_holder(device)))
        device.is_here = False
        loader = AdapterLoader(
            *(self.store, plan.shape, plan.dtype, self.ops, self._image_cache),
            slab=self._host_slab,
        )
        loads = Loads(
            *(loader, self._host_tier, device),
            fetcher=LoaderThread("adapter-fetcher", self._notify),
            copier=LoaderThread("adapter-copier", self._notify),
            disk_bytes=self._image_cache.max_bytes,
            clock=time.monotonic,
        )
        pool = AdapterPool(
            *(device, self._host_tier, loads),
            requests=self._adapter_requests,
            accounts=self.broker.bytes_held.accounts,
            num_pools=lambda: len(self.broker.holders),
            clock=time.monotonic,
        )
        closing.callback(pool.close)
        with lock:
            kv = KVCache(self.arena, digest, plan.kv_layout.page_bytes, source=self.broker)
        closing.callback(_under(lock, kv.close))
        grammars = _read_grammars(plan, self._grammar_threads)
        if grammars is not None:
            closing.callback(grammars.close)
        scheduler = fair_scheduler(
            kv,
            pool,
            buffer,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            max_token_gap_s=config.max_token_gap,
            max_pages=max_kv_extents * kv.pool.pages_per_extent,
            bounds=_queue_bounds(config),
        )
        info = ModelInfo(
            digest,
            name,
            plan.max_model_len,
            adapter_layout=loader.layout.version,
            cache_layout=f"{self.ops.name}:{config.dtype}",
        )
        report = EngineReport(info, scheduler, kv, pool, self.ring)
        engine = Engine(
            info,
            scheduler,
            None,
            kv,
            pool,
            report,
            RequestConstraints(plan.spec.vocab_size, grammars),
            vocab_size=plan.spec.vocab_size,
            end_tokens=frozenset(plan.spec.eos_token_ids),
            clock=time.monotonic,
            runs_ahead=self.runs_ahead,
        )
        addresses = self._device_memory.reserve(num_extents)
        effect_proof = EffectProof(self.store, plan.folder, plan.spec, plan.shape, loader.layout)
        # Done last, because this memory is not returned if the build fails.
        self._extend_memory(num_extents)
        return ServedModel(
            *(engine, pool, report, effect_proof),
            plan=plan,
            state=ModelState(digest, num_extents, weight_bytes / LOAD_BYTES_PER_S),
            make_runner=lambda model: self._make_runner(model, buffer, device.tables),
            num_bytes=weight_bytes,
            image=None if addresses is None else WeightImage(addresses, self.ops),
        )

    def _make_runner(
        self, model: LoadedModel, buffer: TokenBuffer, tables: AdapterTables
    ) -> ModelRunner:
        parts = model, self.ops, self.memory, buffer, tables
        graphs = None
        if self.uses_graphs:
            on_failure = partial(engine_metrics.graph_failures.add, 1)
            limits = _graph_limits(self.config, model.plan)
            graphs = GraphRunner.of(limits, *parts, on_failure=on_failure)
        return self.runner(*parts, graphs)

    def _check(self, plan: ModelPlan, num_extents: int) -> int:
        """Returns the maximum number of KV extents of a model whose weights take `num_extents`.
        Raises CannotServeModel if the model cannot be served."""
        head_dim, known = plan.spec.head_dim, self.ops.head_dims
        if head_dim not in known:
            raise CannotServeModel(
                f"head_dim is {head_dim}, op backend {self.ops.name!r} computes "
                f"multiples of {known.step} up to {known[-1]}"
            )
        extent_bytes, page_bytes = self.arena.extent_bytes, plan.kv_layout.page_bytes
        if page_bytes > extent_bytes:
            raise CannotServeModel(
                f"its KV pages of {gib(page_bytes)} are larger than the worker's extents of"
                f" {gib(extent_bytes)}, which are cut at the start"
            )
        limit, most = self.config.device_memory, self._plan.max_kv_extents
        if limit is None:
            return most
        most = min(most, self.arena.num_kv_extents - num_extents)
        if most < 1:
            needed = (num_extents + self.arena.adapter_floor + 1) * extent_bytes
            raise CannotServeModel(
                f"needs {gib(needed)}, the worker's device_memory is {gib(limit)}"
            )
        return most

    def _extend_memory(self, num_extents: int) -> None:
        """Extends the memory for weights, unless `device_memory` is set. Afterwards the weights of
        all catalog models and of one more model of `num_extents` fit in addition to `memory`.
        Raises CannotServeModel if the machine has too little memory."""
        if self.config.device_memory is not None:
            return
        with self.broker.lock:
            num_given = self._plan.num_weight_extents + self.arena.num_beside
            missing = self._residency.num_wanted + num_extents - num_given
        if missing <= 0:
            return
        try:
            self._device_memory.extend(missing)
        except MemoryError as error:
            needed = gib(missing * self.arena.extent_bytes)
            raise CannotServeModel(f"needs {needed} more beside `memory`, {error}") from error
        with self.broker.lock:
            self.arena.extend(missing)


def _graph_limits(config: WorkerConfig, plan: ModelPlan) -> Limits:
    return Limits.of(
        config.max_num_seqs,
        config.max_batched_tokens,
        plan.max_model_len,
        config.max_loaded_adapters,
        plan.spec.vocab_size,
    )


def _make_arena(config: WorkerConfig, plan: MemoryPlan) -> Arena:
    try:
        return Arena(
            plan.num_extents * plan.extent_bytes,
            plan.extent_bytes,
            first_byte=plan.extent_bytes,
            adapter_floor_bytes=config.adapter_memory_min,
            adapter_ceiling_bytes=plan.adapter_ceiling_bytes,
        )
    except ValueError as error:
        raise CannotServe(f"adapter_memory: {error}") from error


def _read_grammars(plan: ModelPlan, threads: GrammarThreads) -> Grammars | None:
    """Returns the grammar compiler, or None if the model's tokenizer does not support it."""
    tokenizer, ends = plan.folder / "tokenizer.json", frozenset(plan.spec.eos_token_ids)
    try:
        return Grammars(tokenizer, plan.spec.vocab_size, ends, threads)
    except (ValueError, FileNotFoundError) as error:
        log.warning("model %s: no structured output: %s", plan.digest[:12], error)
        return None


def _under(lock: Lock, call: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls `call` with the lock held."""

    def locked() -> None:
        with lock:
            call()

    return locked


def _tokens_per_s(ring: StepRing) -> float:
    """Returns the generated tokens per second in the last ten seconds."""
    recent = ring.last()
    recent = recent[recent["start_s"] > time.monotonic() - 10.0]
    if len(recent) < 2:
        return 0.0
    return float(recent["num_sampled"].sum() / max(time.monotonic() - recent["start_s"][0], 1e-9))


def _queue_bounds(config: WorkerConfig) -> QueueBounds:
    return QueueBounds(config.max_queued, config.max_queued_tokens, config.max_queue_wait)


@contextmanager
def _sized_by(setting: str, value: int) -> Generator[None]:
    """Context that raises CannotServe if torch lacks memory for the object made in it."""
    try:
        yield
    except RuntimeError as error:
        raise CannotServe(f"{setting}: this machine has no memory for {value}") from error


def _make_slab(config: WorkerConfig, virtual: VirtualMemory) -> HostSlab:
    """Allocates the host tier's pinned memory, with a margin for an image that is loaded before
    other images are dropped."""
    num_bytes = config.host_adapter_memory + config.host_adapter_memory // SLAB_MARGIN
    pages = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, pages), dtype=torch.uint8)
    virtual.pin(memory)
    return HostSlab(memory.numpy())
