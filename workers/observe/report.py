"""Reports of an engine: status, prefix cache, and step durations."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from adapters.pool.pool import AdapterPool
from memory.errors import IntegrityError
from memory.kv_cache import KVCache
from telemetry import engine_metrics
from telemetry.tallies import Recent
from workers.execution.observer import FinishedStep
from workers.observe.meter import RequestMeter
from workers.observe.ring import StepRing
from workers.scheduling.scheduler import Scheduler
from workers.wire.prefix_index import changed_pages
from workers.wire.protocol import (
    CachedPages,
    ModelInfo,
    ModelStatus,
)

log = logging.getLogger(__name__)

RECENT = 0.9
"""Factor by which each new term of a `RecentRatio` reduces the weight of earlier terms."""


class EngineReport:
    """Observer of an engine's steps and sequences, which also reports the state of its scheduler,
    pool and caches. All methods are called with the memory lock held."""

    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        kv: KVCache,
        pool: AdapterPool,
        ring: StepRing,
    ) -> None:
        self._info = info
        self._scheduler = scheduler
        self._kv = kv
        self._pool = pool
        self._ring = ring
        self._meter = RequestMeter(info.name)
        # Set as attributes instead of defined as methods, which saves a call per token.
        self.on_tokens, self.on_end = self._meter.on_tokens, self._meter.on_end
        self._decode_steps = RecentRatio()
        """Mean seconds of recent steps without prefill."""
        self._recent_itl = Recent(engine_metrics.inter_token_latency)
        self.num_integrity_failures = 0

    def on_step(self, step: FinishedStep, now: float) -> None:
        self._meter.end_step(now)
        schedule, output = step.schedule, step.output
        num_tokens, num_prefill_tokens = schedule.num_tokens, schedule.num_prefill_tokens
        if num_prefill_tokens == 0:
            self._decode_steps.add(step.device_s, 1)
        labels = self._info.name, engine_metrics.ENGINE
        parts_us = {**step.host_us, "forward": output.forward_us, "sample": output.sample_us}
        engine_metrics.step_tokens.record(num_tokens, *labels)
        for part, us in parts_us.items():
            engine_metrics.step_seconds.add(us * 1e-6, *labels, part)
        adapters = {item.adapter_slot for item in schedule.items if item.adapter_slot >= 0}
        self._ring.append(
            start_s=step.start_s,
            num_tokens=num_tokens,
            num_sequences=len(schedule.items),
            num_prefill_tokens=num_prefill_tokens,
            num_sampled=sum(len(result.tokens) for result in output.sequences),
            num_adapters=len(adapters),
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            num_free_pages=self._kv.num_free,
            num_preempted=schedule.num_preempted,
            **{f"{part}_us": us for part, us in parts_us.items()},
        )

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens that are neither computed nor known to be cached."""
        running = self._scheduler.running
        num_begun = sum(s.num_uncomputed for s in running if s.is_prefilling)
        return self._scheduler.policy.status.num_tokens + num_begun

    def status(self) -> ModelStatus:
        scheduler, kv = self._scheduler, self._kv
        _, (itl,) = self._recent_itl.read()
        counts = self._pool.loads.counts
        return ModelStatus(
            digest=self._info.digest,
            name=self._info.name,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            pages_total=kv.num_total,
            pages_free=kv.num_free - kv.idle.num_pages,
            pages_cached=kv.idle.num_pages,
            num_preemptions=scheduler.num_preemptions,
            prefix_queried_tokens=scheduler.num_queried_tokens,
            prefix_hit_tokens=scheduler.num_hit_tokens,
            num_adapter_evictions=self._pool.device.num_evictions,
            num_integrity_failures=self.num_integrity_failures,
            max_num_seqs=scheduler.max_num_seqs,
            num_waiting_tokens=self.num_waiting_tokens,
            prefill_tokens_per_s=scheduler.policy.status.prompt_tokens_per_s,
            decode_step_s=self._decode_steps.value,
            adapter_loads={tier: loads.number for tier, loads in counts.items()},
            adapter_load_s={tier: loads.seconds for tier, loads in counts.items()},
            num_failed_adapter_loads=self._pool.loads.num_failed,
            itl=engine_metrics.inter_token_latency.buckets(
                itl.get((self._info.name, engine_metrics.ENGINE), ())
            ),
        )

    def cached_pages(self) -> Iterator[CachedPages]:
        """Returns frames with the changes of the prefix cache since the last call. If there were
        too many changes, returns frames with all keys of the cache instead."""
        cache = self._kv.prefix_cache
        changes = cache.journal.take()
        if changes is None:
            return changed_pages(self._info.digest, cache.keys, (), is_whole=True)
        return changed_pages(self._info.digest, *changes)

    def check_integrity(self) -> None:
        """Checks that every page, allocation and slot has exactly one state. If the check fails,
        logs and counts the failure."""
        holders = [*self._scheduler.running, *self._scheduler.leaving]
        try:
            self._kv.check_integrity([p for s in holders for p in s.block_table.held_pages])
            self._pool.check_integrity()
        except IntegrityError:
            self.num_integrity_failures += 1
            log.exception("the memory of %s contradicts itself", self._info.name)


class RecentRatio:
    """Ratio of two recent sums. Each new term reduces the weight of earlier terms by `RECENT`."""

    def __init__(self) -> None:
        self._over = self._under = 0.0

    def add(self, over: float, under: float) -> None:
        self._over = RECENT * self._over + over
        self._under = RECENT * self._under + under

    @property
    def value(self) -> float:
        """Current ratio; 0 before the first term."""
        return self._over / self._under if self._under > 0.0 else 0.0
