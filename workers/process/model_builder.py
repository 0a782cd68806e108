"""Builds all parts of a worker that belong to one model, except the model's weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from adapters.pool.device import DeviceTier
from adapters.pool.host import HostTier
from adapters.pool.host_slab import HostSlab
from adapters.pool.image import ImageCache
from adapters.pool.loader import AdapterLoader, LoaderThreads
from adapters.pool.loads import Loads
from adapters.pool.pool import AdapterPool
from adapters.store.folder import Store
from memory.kv_cache import KVCache
from memory.reuse import ReuseByKey
from ops.base import AdapterTables, Ops
from ops.commands import PendingCommands
from telemetry import engine_metrics
from workers.base_models.residency import ModelResidency, ModelState
from workers.base_models.served_model import ServedModel
from workers.constraints.grammars import Grammars
from workers.constraints.request_constraints import RequestConstraints
from workers.constraints.sequence_grammar import GrammarThreads
from workers.device.weight_image import WeightImage
from workers.execution.batch import ModelBuffers, rank_bound
from workers.execution.engine import Engine
from workers.execution.graph_runner import GraphRunner, Limits, compute_logits
from workers.execution.model_runner import ModelRunner
from workers.models.loading import LoadedModel
from workers.models.plan import ModelPlan
from workers.models.unnamed_ids import read_unnamed_ids
from workers.observe.report import EngineReport
from workers.observe.ring import StepRing
from workers.policies.fair_scheduler import fair_scheduler
from workers.policies.queue_limits import QueueBounds
from workers.process.config import WorkerConfig
from workers.process.errors import CannotServe, CannotServeModel
from workers.process.worker_memory import WorkerMemory
from workers.verification.effect_proof import EffectProof
from workers.wire.protocol import ModelInfo
from workers.wire.request_check import RequestLimits

log = logging.getLogger(__name__)

LOAD_BYTES_PER_S = 1e9
"""Assumed speed of a model's load in bytes per second, until the first load is measured."""

NUM_REMOTE_FETCHERS = 4
"""Number of threads that fetch a model's adapters from a remote store. They mostly wait, and one
tenant uses at most three of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBuilder:
    """Builder of a worker's models, with the parts that all models share.

    - host_slab: pinned memory for images of adapters, or None if the device reads ordinary memory.
    - notify: thread-safe function that is called when a load has ended.
    - runner: class of the models' runners.
    - runs_ahead: whether a step is scheduled while the previous step is computed.
    - uses_graphs: whether steps of few tokens run as captured graphs.
    """

    config: WorkerConfig
    bounds: QueueBounds
    ops: Ops
    store: Store
    memory: WorkerMemory
    residency: ModelResidency
    host_tier: HostTier
    host_slab: HostSlab | None
    image_cache: ImageCache
    adapter_requests: ReuseByKey
    grammar_threads: GrammarThreads
    ring: StepRing
    notify: Callable[[], None]
    runner: type[ModelRunner]
    runs_ahead: bool
    uses_graphs: bool

    def build(self, name: str, plan: ModelPlan) -> ServedModel:
        """Builds everything that the model needs except its weights. Called on any thread without
        the memory lock. Before it raises CannotServe, OSError or MemoryError, it closes all parts
        that it has built."""
        with ExitStack() as closing:
            model = self._build(name, plan, closing)
            model.closing = closing.pop_all()
        return model

    def _build(self, name: str, plan: ModelPlan, closing: ExitStack) -> ServedModel:
        """Builds the model. closing: stack to which callbacks that free its parts are added."""
        config, memory, broker = self.config, self.memory, self.memory.broker
        self._check_heads(plan)
        weight_bytes, page_bytes = plan.max_bytes(self.ops), plan.kv_layout.page_bytes
        num_extents = -(-weight_bytes // memory.arena.extent_bytes)
        max_kv_extents = memory.max_kv_extents(num_extents, page_bytes)
        with _sized_by("max_num_seqs", config.max_num_seqs):
            size = config.max_num_seqs, plan.max_model_len
            tokens = torch.zeros(size, dtype=torch.int32, device=self.ops.device)
        with _sized_by("max_loaded_adapters", config.max_loaded_adapters):
            table = plan.shape.num_layers + 1, len(plan.shape.projections)
            tables = AdapterTables.empty((config.max_loaded_adapters, *table), self.ops.device)
        buffers, commands = ModelBuffers(memory.device.tensor, tokens, tables), PendingCommands()
        device = DeviceTier(
            *(buffers.arena, memory.adapters, broker),
            ops=self.ops,
            commands=commands,
            copies=buffers.copies,
            table_shape=table,
            num_slots=config.max_loaded_adapters,
            clock=time.monotonic,
        )
        with broker.lock:
            closing.callback(self._call_locked, broker.add_holder(device))
        device.is_here = False
        loader = AdapterLoader(
            *(self.store, plan.shape, plan.dtype, self.ops, self.image_cache), slab=self.host_slab
        )
        num_fetchers = NUM_REMOTE_FETCHERS if self.store.is_remote else 1
        loads = Loads(
            *(loader, self.host_tier, device),
            lock=broker.lock,
            fetcher=LoaderThreads("adapter-fetcher", self.notify, count=num_fetchers),
            copier=LoaderThreads("adapter-copier", self.notify),
            disk_bytes=self.image_cache.max_bytes,
            clock=time.monotonic,
            num_fetchers=num_fetchers,
        )
        pool = AdapterPool(loads, requests=self.adapter_requests, clock=time.monotonic)
        closing.callback(pool.close)
        with broker.lock:
            kv = KVCache(memory.arena, plan.digest, page_bytes, source=broker)
        closing.callback(self._call_locked, kv.close)
        grammars = self._read_grammars(plan)
        if grammars is not None:
            closing.callback(grammars.close)
        scheduler = fair_scheduler(
            *(kv, pool, commands),
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            max_token_gap_s=config.max_token_gap,
            max_gap_ratio=config.max_gap_ratio,
            bounds=self.bounds,
        )
        info = ModelInfo(
            *(plan.digest, name, plan.max_model_len),
            adapter_layout=loader.layout.version,
            cache_layout=f"{self.ops.name}:{config.dtype}",
        )
        report = EngineReport(name, scheduler, self.ring)
        constraints = RequestConstraints(plan.spec.vocab_size, grammars)
        limits = RequestLimits(
            plan.max_model_len,
            max_pages=max_kv_extents * kv.pool.pages_per_extent,
            vocab_size=plan.spec.vocab_size,
            end_tokens=frozenset(plan.spec.eos_token_ids),
        )
        engine = Engine(
            *(info, scheduler, None, report, constraints, limits),
            clock=time.monotonic,
            runs_ahead=self.runs_ahead,
        )
        unnamed_ids = read_unnamed_ids(plan.folder, plan.spec.vocab_size, plan.spec.eos_token_ids)
        addresses = memory.device.reserve(num_extents)
        effect_proof = EffectProof(self.store, plan.folder, plan.spec, plan.shape, loader.layout)
        with broker.lock:
            num_wanted = self.residency.num_wanted
        # This must be the last step, because a failure after it would leave the memory enlarged.
        memory.extend(num_wanted + num_extents)
        return ServedModel(
            *(engine, pool, report, effect_proof),
            plan=plan,
            state=ModelState(plan.digest, num_extents, weight_bytes / LOAD_BYTES_PER_S),
            make_runner=lambda model: self._make_runner(model, buffers, unnamed_ids),
            num_bytes=weight_bytes,
            image=None if addresses is None else WeightImage(addresses, self.ops),
        )

    def _make_runner(
        self, model: LoadedModel, buffers: ModelBuffers, unnamed_ids: list[int]
    ) -> ModelRunner:
        graphs = None
        if self.uses_graphs:
            on_failure = partial(engine_metrics.graph_failures.add, 1)
            limits = graph_limits(self.config, model.plan)
            compute = partial(compute_logits, model, buffers)
            graphs = GraphRunner(limits, self.ops, compute, on_failure)
        return self.runner(model, self.ops, buffers, graphs, unnamed_ids)

    def _check_heads(self, plan: ModelPlan) -> None:
        """Raises CannotServeModel if the op backend does not compute heads of the model's size."""
        head_dim, known = plan.spec.head_dim, self.ops.head_dims
        if head_dim not in known:
            raise CannotServeModel(
                f"head_dim is {head_dim}, op backend {self.ops.name!r} computes "
                f"multiples of {known.step} up to {known[-1]}"
            )

    def _read_grammars(self, plan: ModelPlan) -> Grammars | None:
        """Returns the grammar compiler. Returns None if the model has no tokenizer.json that the
        compiler supports."""
        tokenizer, ends = plan.folder / "tokenizer.json", frozenset(plan.spec.eos_token_ids)
        try:
            return Grammars(tokenizer, plan.spec.vocab_size, ends, self.grammar_threads)
        except (ValueError, FileNotFoundError) as error:
            log.warning("model %s: no structured output: %s", plan.digest[:12], error)
            return None

    def _call_locked(self, call: Callable[[], None]) -> None:
        with self.memory.broker.lock:
            call()


def read_plan(config: WorkerConfig, store: Store, digest: str) -> ModelPlan:
    """Returns the model's plan. Fetches the model unless it is on this machine. Thread-safe."""
    folder, dtype = store.model_folder(digest), getattr(torch, config.dtype)
    return ModelPlan.read(folder, digest, dtype, config.max_model_len)


def graph_limits(config: WorkerConfig, plan: ModelPlan) -> Limits:
    return Limits(
        config.max_num_seqs,
        config.max_batched_tokens,
        plan.max_model_len,
        config.max_loaded_adapters,
        rank_bound(config.max_lora_rank),
        plan.spec.vocab_size,
    )


def buffer_bytes(config: WorkerConfig, plan: ModelPlan, *, uses_graphs: bool) -> int:
    """Returns the bytes of the model's token buffer, adapter tables and graph buffers, which are
    allocated on the device outside the arena."""
    tokens = config.max_num_seqs * plan.max_model_len * torch.int32.itemsize
    num_entries = (plan.shape.num_layers + 1) * len(plan.shape.projections)
    entry_bytes = 2 * torch.int64.itemsize + torch.int32.itemsize
    tables = config.max_loaded_adapters * num_entries * entry_bytes
    return tokens + tables + (graph_limits(config, plan).num_bytes if uses_graphs else 0)


@contextmanager
def _sized_by(setting: str, value: int) -> Generator[None]:
    """Context manager that raises CannotServe, with the setting and its value, if an allocation
    inside the context fails."""
    try:
        yield
    except RuntimeError as error:
        raise CannotServe(f"{setting}: this machine has no memory for {value}") from error
