"""Composition of a worker: from a configuration to a loop of engines that share one arena."""

from __future__ import annotations

import logging
import mmap
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial
from heapq import nlargest
from operator import itemgetter
from typing import NamedTuple

import torch

import ops.registry
from adapters.pool.device import DeviceTier
from adapters.pool.host import HostTier
from adapters.pool.host_slab import HostSlab
from adapters.pool.image import ImageCache
from adapters.pool.loader import AdapterLoader, one_thread
from adapters.pool.loads import Loads
from adapters.pool.pool import AdapterPool
from adapters.store.opening import open_store
from memory.arena import Arena
from memory.eviction.adapter_memory import UNIT_BYTES, AdapterMemory
from memory.eviction.broker import MemoryBroker
from memory.eviction.tier import Tier
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS
from memory.reuse import ReuseByKey
from ops.base import Ops
from ops.processor import quota_cores
from telemetry import engine_metrics
from workers.base_models.fetcher import ModelFetcher
from workers.base_models.loader import ModelLoader
from workers.base_models.model_pool import LOAD_BYTES_PER_S, ModelPool, RegisteredModel
from workers.base_models.residency import ModelResidency
from workers.constraints.grammars import Grammars
from workers.constraints.request_constraints import RequestConstraints
from workers.constraints.sequence_grammar import GrammarThreads
from workers.device.cuda_memory import CudaVirtualMemory
from workers.device.device_memory import DeviceMemory, HostMemory, MappedMemory, gib
from workers.device.virtual_memory import HostVirtualMemory, VirtualMemory
from workers.device.weight_image import WeightImage
from workers.execution.engine import Engine
from workers.execution.graph_runner import Limits
from workers.execution.model_runner import ModelRunner
from workers.execution.speed import measure_speed
from workers.execution.token_buffer import TokenBuffer
from workers.models.loading import LoadedModel
from workers.models.plan import ModelPlan
from workers.observe.report import EngineReport
from workers.observe.ring import StepRing
from workers.policies.fair_scheduler import fair_scheduler
from workers.policies.queue_limits import QueueBounds
from workers.process.config import WorkerConfig
from workers.process.inbox import Inbox
from workers.process.loop import WorkerLoop
from workers.process.machine import CannotServe, settled
from workers.process.server import Delivery
from workers.verification.adapter_verifier import AdapterVerifier, ModelInstance
from workers.verification.effect_proof import EffectProof
from workers.wire.protocol import (
    ErrorCode,
    Failed,
    Generate,
    ModelInfo,
    SamplingParams,
    TenantStatus,
    WorkerStatus,
)

log = logging.getLogger(__name__)

ModelProgress = Callable[[str, int, int], None]
"""Called with the name of the loading model, the bytes done and the total bytes."""

PAGES_PER_EXTENT = 8
DEFAULT_PAGE_BYTES = 1 << 20
"""Assumed page size while no model is known, so that extents can hold pages of large models."""
MAX_TENANTS = 100
"""Maximum number of tenants in a status."""
MAX_EXTENTS = 1024
"""Maximum number of extents. More would only make every trade of memory slower."""


class CannotServeModel(CannotServe):
    """Model that this worker's configuration cannot serve. The message does not name it."""


SLAB_MARGIN = 8
WARM_TOKENS = 8


class Worker:
    """All parts of one worker process, built and warmed up."""

    runner: type[ModelRunner] = ModelRunner

    def __init__(self, config: WorkerConfig, *, instance_id: str, progress: ModelProgress) -> None:
        """Loads models to the device in the order of the configuration, as far as there is room.
        Raises CannotServe, and what `load_model` raises."""
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
        granularity = UNIT_BYTES if virtual is None else max(UNIT_BYTES, virtual.granularity)
        limits = map(self._graph_limits, plans.values())
        graph_bytes = sum(each.num_bytes for each in limits if each is not None)
        self.arena, self._kv_extents, self._weight_extents = _make_arena(
            config, self._footprints(plans.values()), granularity, graph_bytes
        )
        sizes = (self.arena.num_extents, self.arena.extent_bytes)
        try:
            self._device_memory: DeviceMemory = (
                HostMemory(*sizes) if virtual is None else MappedMemory(virtual, *sizes)
            )
        except (OSError, OverflowError) as error:
            raise CannotServe(
                f"{_setting(config)}: this machine gives no {self.arena.num_bytes} bytes: {error}"
            ) from error
        self.arena.backing = self._device_memory
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
        self._closing = ExitStack()
        """Closes threads and processes."""
        self._grammar_threads = GrammarThreads()
        self._closing.callback(self._grammar_threads.close)
        self.instances: dict[str, ModelInstance] = {}
        self.verifier = AdapterVerifier(self.instances, clock=time.monotonic)
        self._residency = ModelResidency(
            self.arena.num_kv_extents,
            clock=time.monotonic,
            max_wait_s=config.max_model_wait_s,
            max_drain_s=config.max_model_drain_s,
        )
        self.model_pool = ModelPool(
            self._residency,
            self.arena,
            self.broker,
            ModelLoader(self.ops),
            ModelFetcher(self._read_plan, clock=time.monotonic),
            self.verifier,
            host=Tier(config.host_model_memory or sys.maxsize),
            build=self._build,
            clock=time.monotonic,
        )
        for digest, plan in plans.items():
            try:
                self.model_pool.add(names[digest], plan)
            except CannotServeModel as error:
                raise CannotServe(f"model {names[digest]}: {error}") from error
        for digest, name in names.items():
            if self.model_pool.load_now(digest, partial(progress, name)):
                self._warm_up(digest)
        self._num_compiled = self.ops.num_compiled

    def close(self) -> None:
        """Closes pools and threads, dropping queued loads. Called after the loop has ended."""
        self._closing.close()
        for instance in self.instances.values():
            instance.pool.close()

    def remove_deleted_images(self) -> None:
        """Removes the files of packed images whose adapters are deleted from the store. Raises
        OSError if the store does not answer. Called on any thread."""
        self._image_cache.remove_deleted(partial(self.store.exists, "adapters"))

    @property
    def engines(self) -> dict[str, Engine]:
        return {digest: instance.engine for digest, instance in self.instances.items()}

    def make_loop(self, deliver: Callable[[Delivery], None]) -> WorkerLoop:
        """Returns the loop that runs the engines. Start it once."""
        hints = one_thread("adapter-hints")
        self._closing.callback(hints.shutdown)
        inbox = Inbox(
            self.instances,
            bounds=_queue_bounds(self.config),
            memory=self.broker.lock,
            hints=hints,
            deliver=deliver,
            clock=time.monotonic,
        )
        return WorkerLoop(
            inbox,
            memory=self.broker.lock,
            verifier=self.verifier,
            model_pool=self.model_pool,
            deliver=deliver,
            status=self.status,
            clock=time.monotonic,
        )

    @property
    def _is_beside(self) -> bool:
        """Whether the device computes asynchronously."""
        return self.ops.device.type == "cuda"

    @property
    def _uses_graphs(self) -> bool:
        uses_graphs = self.config.uses_graphs
        return self._is_beside if uses_graphs is None else uses_graphs

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

    def _graph_limits(self, plan: ModelPlan) -> Limits | None:
        config = self.config
        if not self._uses_graphs:
            return None
        return Limits.of(
            config.max_num_seqs,
            config.max_batched_tokens,
            plan.max_model_len,
            config.max_loaded_adapters,
            plan.spec.vocab_size,
        )

    def _warm_up(self, digest: str) -> None:
        """Warms up a model loaded at start-up. A model loaded later compiles its kernels and
        captures its graphs during its first steps."""
        engine = self.instances[digest].engine
        assert isinstance(engine.runner, ModelRunner)
        try:
            engine.runner.warm_up(self.config.max_lora_rank, self.config.max_batched_tokens)
            warm_up(engine)
            measure_speed(engine, time.monotonic)
        except CannotServe:
            raise
        except Exception as error:
            log.exception("a warm-up step failed", exc_info=error)
            raise CannotServe(f"a warm-up step failed: {error}") from error

    def _virtual_memory(self) -> VirtualMemory | None:
        """Returns virtual memory for weights, or None if they are reloaded into ordinary
        allocations (CPU without `keeps_weights`)."""
        if self._is_beside:
            return CudaVirtualMemory.of(self.ops.device)
        return HostVirtualMemory() if self.config.keeps_weights else None

    def status(self, draining: bool, generation: int) -> WorkerStatus:
        """Returns the current status. Called on the engine thread only."""
        instances = self.instances.values()
        held, adapters = self.arena.bytes_held.held, self.adapter_memory.held_bytes()
        num_cached, cached_bytes = self._image_cache.held
        return WorkerStatus(
            instance_id=self.instance_id,
            draining=draining,
            models=self.model_pool.status(),
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
        """Fetches the model unless this machine has it, and returns its plan. Thread-safe."""
        folder, dtype = self.store.model_folder(digest), getattr(torch, self.config.dtype)
        return ModelPlan.read(folder, digest, dtype, self.config.max_model_len)

    def _footprints(self, plans: Iterable[ModelPlan]) -> list[Footprint]:
        return [Footprint(p.kv_layout.page_bytes, p.max_bytes(self.ops)) for p in plans]

    def _build(self, name: str, plan: ModelPlan) -> RegisteredModel:
        """Builds all that the model needs except its weights. Raises CannotServeModel, or
        CannotServe if a setting is too large."""
        config, digest = self.config, plan.digest
        head_dim, known = plan.spec.head_dim, self.ops.head_dims
        if head_dim not in known:
            raise CannotServeModel(
                f"head_dim is {head_dim}, op backend {self.ops.name!r} computes "
                f"multiples of {known.step} up to {known[-1]}"
            )
        weight_bytes = plan.max_bytes(self.ops)
        extent_bytes, page_bytes = self.arena.extent_bytes, plan.kv_layout.page_bytes
        if page_bytes > extent_bytes:
            raise CannotServeModel(
                f"its KV pages of {gib(page_bytes)} are larger than the worker's extents of"
                f" {gib(extent_bytes)}, which are cut at the start"
            )
        num_extents = -(-weight_bytes // extent_bytes)
        most = self._max_kv_extents(num_extents)
        self._make_room_beside(num_extents)
        with _sized_by("max_num_seqs", config.max_num_seqs):
            buffer = TokenBuffer(config.max_num_seqs, plan.max_model_len, self.ops.device)
        with _sized_by("max_loaded_adapters", config.max_loaded_adapters):
            device = DeviceTier(
                *(self.memory, self.adapter_memory, self.broker),
                ops=self.ops,
                shape=plan.shape,
                num_slots=config.max_loaded_adapters,
                clock=time.monotonic,
            )
        device.is_here = False
        loader = AdapterLoader(
            *(self.store, plan.shape, plan.dtype, self.ops, self._image_cache),
            slab=self._host_slab,
        )
        loads = Loads(
            *(loader, self._host_tier, device),
            fetcher=one_thread("adapter-fetcher"),
            copier=one_thread("adapter-copier"),
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
        kv = KVCache(self.arena, digest, plan.kv_layout.page_bytes, source=self.broker)
        scheduler = fair_scheduler(
            kv,
            pool,
            buffer,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            max_token_gap_s=config.max_token_gap,
            max_pages=most * kv.pool.pages_per_extent,
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
            RequestConstraints(plan.spec.vocab_size, self._read_grammars(plan)),
            vocab_size=plan.spec.vocab_size,
            end_tokens=frozenset(plan.spec.eos_token_ids),
            clock=time.monotonic,
            runs_ahead=self._is_beside if config.runs_ahead is None else config.runs_ahead,
        )

        def make_runner(model: LoadedModel) -> ModelRunner:
            return self.runner(
                *(model, self.ops, self.memory, buffer, device.tables),
                graphs=self._graph_limits(plan),
                on_failed_capture=partial(engine_metrics.graph_failures.add, 1),
            )

        effect_proof = EffectProof(self.store, plan.folder, plan.spec, plan.shape, loader.layout)
        instance = self.instances[digest] = ModelInstance(engine, pool, report, effect_proof)
        state = self._residency.add(digest, num_extents, weight_bytes / LOAD_BYTES_PER_S)
        addresses = self._device_memory.reserve(num_extents)
        image = None if addresses is None else WeightImage(addresses, self.ops)
        return RegisteredModel(plan, instance, state, make_runner, weight_bytes, image)

    def _read_grammars(self, plan: ModelPlan) -> Grammars | None:
        """Returns the grammar compiler, or None if the model's tokenizer does not support it."""
        tokenizer, spec = plan.folder / "tokenizer.json", plan.spec
        try:
            grammars = Grammars(
                tokenizer, spec.vocab_size, frozenset(spec.eos_token_ids), self._grammar_threads
            )
        except (ValueError, OSError) as error:
            log.warning("model %s: no structured output: %s", plan.digest[:12], error)
            return None
        self._closing.callback(grammars.close)
        return grammars

    def _max_kv_extents(self, num_extents: int) -> int:
        """Returns the maximum number of KV extents of a model whose weights have `num_extents`.
        Raises CannotServeModel if there would be none."""
        limit = self.config.device_memory
        if limit is None:
            return self._kv_extents
        most = min(self._kv_extents, self.arena.num_kv_extents - num_extents)
        if most < 1:
            needed = (num_extents + self.arena.adapter_floor + 1) * self.arena.extent_bytes
            raise CannotServeModel(
                f"needs {gib(needed)}, the worker's device_memory is {gib(limit)}"
            )
        return most

    def _make_room_beside(self, num_extents: int) -> None:
        """Extends the memory for weights if `device_memory` is not set. It then holds the weights
        of all catalog models besides `memory`. Raises CannotServeModel if the machine lacks
        memory."""
        if self.config.device_memory is not None:
            return
        wanted = self._residency.num_wanted + num_extents
        missing = wanted - self._weight_extents - self.arena.num_beside
        if missing <= 0:
            return
        try:
            self._device_memory.extend(missing)
        except MemoryError as error:
            needed = gib(missing * self.arena.extent_bytes)
            raise CannotServeModel(f"needs {needed} more beside `memory`, {error}") from error
        self.arena.extend(missing)
        self._residency.capacity += missing


def warm_up(engine: Engine) -> None:
    """Runs a short sequence through the whole engine, and then a step with as many sequences as
    possible, so that kernels are built and caches and threads are warm. Prompts are shorter than a
    page, so none stays cached. Raises CannotServe if a step fails."""
    longest = min(engine.info.max_model_len, PAGE_TOKENS)
    _run_alone(engine, [[0, 1, 2]], max_tokens=min(WARM_TOKENS, longest - 3))
    scheduler = engine.scheduler
    length = longest - 1
    fitting = min(scheduler.max_num_seqs, scheduler.num_free_pages)
    num_prompts = min(fitting, scheduler.max_batched_tokens // length)
    _run_alone(engine, [[0] * length] * num_prompts, max_tokens=1)


def _run_alone(engine: Engine, prompts: list[list[int]], max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        request = Generate(number, "warm-up", engine.info.digest, prompt, params, cache_domain="")
        failed = engine.submit(-1, request)
        assert failed is None, failed
    while engine.has_work:
        for _, event in engine.step():
            # A model with NaN logits is served; each of its requests fails with that error.
            if isinstance(event, Failed) and event.code is not ErrorCode.LOGITS_NAN:
                raise CannotServe(f"the step that warms the worker up failed: {event.message}")


def _tokens_per_s(ring: StepRing) -> float:
    """Returns the generated tokens per second in the last ten seconds."""
    recent = ring.last()
    recent = recent[recent["start_s"] > time.monotonic() - 10.0]
    if len(recent) < 2:
        return 0.0
    return float(recent["num_sampled"].sum() / max(time.monotonic() - recent["start_s"][0], 1e-9))


def _queue_bounds(config: WorkerConfig) -> QueueBounds:
    return QueueBounds(config.max_queued, config.max_queued_tokens, config.max_queue_wait)


class Footprint(NamedTuple):
    page_bytes: int
    weight_bytes: int


@contextmanager
def _sized_by(setting: str, value: int) -> Generator[None]:
    """Raises CannotServe if torch lacks the memory for the object made in the context."""
    try:
        yield
    except RuntimeError as error:
        raise CannotServe(f"{setting}: this machine has no memory for {value}") from error


def _setting(config: WorkerConfig) -> str:
    """Returns the name of the setting that determines the memory."""
    return "memory" if config.device_memory is None else "device_memory"


class Cut(NamedTuple):
    """Division of memory into extents."""

    extent_bytes: int
    weight_extents: list[int]
    least_bytes: int
    """Minimum value of the setting: adapters' floor, one KV extent, largest weights if included."""


def _make_slab(config: WorkerConfig, virtual: VirtualMemory) -> HostSlab:
    """Allocates the host tier's pinned memory, with a margin for an image that arrives before
    others are dropped."""
    num_bytes = config.host_adapter_memory + config.host_adapter_memory // SLAB_MARGIN
    pages = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, pages), dtype=torch.uint8)
    virtual.pin(memory)
    return HostSlab(memory.numpy())


def _make_arena(
    config: WorkerConfig, models: list[Footprint], granularity: int, graph_bytes: int
) -> tuple[Arena, int, int]:
    """Returns the arena, the maximum number of its KV extents, and the number of extents for the
    weights of `models`. granularity: divisor of an extent's bytes. graph_bytes: bytes of
    `device_memory` for captured graphs, outside the arena.

    Without `device_memory` there is room for `memory` in addition to the weights of all models.
    Raises CannotServe.
    """
    beside = graph_bytes if config.device_memory is not None else 0
    given = (config.device_memory or config.memory) - beside
    cut = _cut(given, config, models, granularity)
    if given < cut.least_bytes:
        least = cut.least_bytes
        while least < (cut := _cut(least, config, models, granularity)).least_bytes:
            least = cut.least_bytes
        raise CannotServe(
            f"{_setting(config)}: {given + beside} bytes are too few for what this worker serves;"
            f" the least is {least + beside}"
        )
    extent_bytes = cut.extent_bytes
    if config.device_memory is None:
        num_shared = config.memory // extent_bytes
        num_extents = num_shared + sum(cut.weight_extents)
    else:
        num_extents = given // extent_bytes
        num_shared = num_extents - min(cut.weight_extents, default=0)
    ceiling = config.adapter_memory_max
    try:
        arena = Arena(
            num_extents * extent_bytes,
            extent_bytes,
            first_byte=extent_bytes,
            adapter_floor_bytes=config.adapter_memory_min,
            adapter_ceiling_bytes=num_shared * extent_bytes if ceiling is None else ceiling,
        )
    except ValueError as error:
        raise CannotServe(f"adapter_memory: {error}") from error
    return arena, num_shared - arena.adapter_floor, sum(cut.weight_extents)


def _cut(given: int, config: WorkerConfig, models: list[Footprint], granularity: int) -> Cut:
    """Divides `given` bytes (of `device_memory`, or else of `memory`) into extents."""
    is_all = config.device_memory is not None
    total = given if is_all else given + sum(model.weight_bytes for model in models)
    page_bytes = max((model.page_bytes for model in models), default=DEFAULT_PAGE_BYTES)
    wanted = max(PAGES_PER_EXTENT * page_bytes, total // MAX_EXTENTS)
    extent_bytes = -(-wanted // granularity) * granularity
    weight_extents = [-(-model.weight_bytes // extent_bytes) for model in models]
    floor = -(-config.adapter_memory_min // extent_bytes)
    num_needed = floor + 1 + (max(weight_extents, default=0) if is_all else 0)
    return Cut(extent_bytes, weight_extents, num_needed * extent_bytes)
