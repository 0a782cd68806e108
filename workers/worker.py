"""The worker's composition root: from a config to a loop of engines that share one arena."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import torch

import ops.registry
from adapters.pool import AdapterPool
from adapters.stores import open_store
from memory.arena import Arena
from memory.broker import MemoryBroker
from memory.kv_cache import KVCache
from memory.runs import UNIT_BYTES, AdapterRuns
from ops.base import Ops
from workers.config import WorkerConfig
from workers.effect import Examiner
from workers.engine import Engine
from workers.loop import WorkerLoop
from workers.model_runner import ModelRunner
from workers.models.decoder import Decoder
from workers.overload import QueueBounds
from workers.probe import Prober, Target
from workers.protocol import Generate, ModelInfo, SamplingParams, WorkerStatus
from workers.scheduler import Scheduler
from workers.server import Delivery
from workers.step_ring import StepRing
from workers.token_buffer import TokenBuffer

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with what is loading, the bytes done and the bytes in all."""

PAGES_PER_EXTENT = 8
MAX_EXTENTS = 1024
"""More of them only make every trade of memory slower."""


class Worker:
    """Everything one worker process owns, built and warmed up."""

    def __init__(self, config: WorkerConfig, *, instance_id: str, progress: Progress) -> None:
        self.config = config
        self.instance_id = instance_id
        self.ring = StepRing()
        self.ops = _select_ops(config)
        self.store = open_store(config.store, config.cache_dir / "store")
        models = {
            name: self._load(name, digest, progress) for name, digest in config.models.items()
        }
        pages = [model.kv_layout.page_bytes for model in models.values()]
        self.arena = Arena(
            config.memory,
            _extent_bytes(pages, config.memory),
            adapter_floor_bytes=config.adapter_memory_min,
            adapter_ceiling_bytes=config.adapter_memory_max,
        )
        self.memory = torch.empty(config.memory, dtype=torch.uint8, device=self.ops.device)
        self.runs = AdapterRuns(self.arena)
        self.broker = MemoryBroker(self.arena, self.runs)
        self.targets = {
            config.models[name]: self._build(name, model) for name, model in models.items()
        }
        self.engines = {digest: target.engine for digest, target in self.targets.items()}
        for engine in self.engines.values():
            warm_up(engine)

    def make_loop(self, deliver: Callable[[Delivery], None]) -> WorkerLoop:
        """The thread that runs the engines; `start` it once."""
        return WorkerLoop(
            self.engines,
            memory=self.broker.lock,
            prober=Prober(self.targets, clock=time.monotonic),
            deliver=deliver,
            status=self.status,
            clock=time.monotonic,
        )

    def status(self, draining: bool, generation: int) -> WorkerStatus:
        """What is, now. On the engine's thread only."""
        engines = self.engines.values()
        return WorkerStatus(
            instance_id=self.instance_id,
            draining=draining,
            models=[engine.status() for engine in engines],
            adapters=[adapter for engine in engines for adapter in engine.adapter_status()],
            arena_bytes=self.arena.num_bytes,
            extents=self.arena.map(),
            settings=self.config.effective(),
            step=self.ring.num_steps,
            tokens_per_s=_tokens_per_s(self.ring),
            generation=generation,
        )

    def _load(self, name: str, digest: str, progress: Progress) -> Decoder:
        return Decoder.load(
            self.store.model_folder(digest),
            digest,
            self.ops,
            getattr(torch, self.config.dtype),
            max_model_len=self.config.max_model_len,
            progress=lambda done, total: progress(name, done, total),
        )

    def _build(self, name: str, model: Decoder) -> Target:
        config = self.config
        digest = config.models[name]
        kv = KVCache(self.arena, digest, model.kv_layout.page_bytes, broker=self.broker)
        pool = AdapterPool(
            self.memory,
            self.runs,
            self.broker,
            store=self.store,
            ops=self.ops,
            shape=model.shape,
            dtype=model.kv_layout.dtype,
            num_slots=config.max_loaded_adapters,
            host_bytes=config.host_adapter_memory,
            cache_bytes=config.adapter_cache,
            cache_dir=config.cache_dir,
            clock=time.monotonic,
        )
        buffer = TokenBuffer(config.max_num_seqs, model.max_model_len, self.ops.device)
        scheduler = Scheduler(
            kv,
            pool,
            buffer,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            bounds=QueueBounds(config.max_queued, config.max_queued_tokens, config.max_queue_wait),
        )
        runner = ModelRunner(model, self.ops, self.memory, kv, buffer, pool.tables)
        engine = Engine(
            ModelInfo(
                digest,
                name,
                model.max_model_len,
                adapter_layout=pool.layout.version,
                cache_layout=f"{self.ops.name}:{config.dtype}",
            ),
            scheduler,
            runner,
            kv,
            pool,
            self.ring,
            vocab_size=model.spec.vocab_size,
            end_tokens=frozenset(model.spec.eos_token_ids),
            clock=time.monotonic,
        )
        folder = self.store.model_folder(digest)
        examiner = Examiner(self.store, folder, model.spec, model.shape, pool.layout)
        return Target(engine, pool, runner, examiner)


def warm_up(engine: Engine) -> None:
    """One short sequence through the whole engine: kernels are built, caches and threads are
    warm."""
    params = SamplingParams(max_tokens=2, seed=0, temperature=0.0, ignore_eos=True)
    request = Generate(0, "warm-up", engine.info.digest, [0, 1, 2], params, cache_domain="")
    failed = engine.submit(-1, request)
    assert failed is None, failed
    while engine.has_work:
        engine.step()


def _tokens_per_s(ring: StepRing) -> float:
    """Generated tokens a second over the last steps of the last ten seconds."""
    recent = ring.last()
    recent = recent[recent["start_s"] > time.monotonic() - 10.0]
    if len(recent) < 2:
        return 0.0
    return float(recent["num_sampled"].sum() / max(time.monotonic() - recent["start_s"][0], 1e-9))


def _select_ops(config: WorkerConfig) -> Ops:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    log.info("op backend %s, %d threads, pid %d", config.ops, torch.get_num_threads(), os.getpid())
    return ops.registry.select(config.ops)


def _extent_bytes(page_bytes: list[int], memory: int) -> int:
    """Some pages of the largest model at least, in whole adapter units."""
    wanted = max(PAGES_PER_EXTENT * max(page_bytes), memory // MAX_EXTENTS)
    return -(-wanted // UNIT_BYTES) * UNIT_BYTES
