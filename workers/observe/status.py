"""Status of one base model's engine, adapters and caches. The functions are called with the memory
lock held."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from adapters.pool.pool import AdapterPool
from memory.errors import IntegrityError
from workers.execution.engine import Engine
from workers.observe.report import EngineReport
from workers.wire.frames import CachedPages
from workers.wire.prefix_index import changed_pages
from workers.wire.status import ModelStatus

log = logging.getLogger(__name__)


def model_status(engine: Engine, pool: AdapterPool, report: EngineReport) -> ModelStatus:
    info, scheduler, loads = engine.info, engine.scheduler, pool.loads
    kv, queue = scheduler.kv, scheduler.policy.status
    return ModelStatus(
        digest=info.digest,
        name=info.name,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        pages_total=kv.num_total,
        pages_free=kv.num_free - kv.idle.num_pages,
        pages_cached=kv.idle.num_pages,
        num_preemptions=scheduler.num_preemptions,
        prefix_queried_tokens=scheduler.num_queried_tokens,
        prefix_hit_tokens=scheduler.num_hit_tokens,
        num_adapter_evictions=pool.device.num_evictions,
        num_integrity_failures=report.num_integrity_failures,
        max_num_seqs=scheduler.max_num_seqs,
        num_waiting_tokens=scheduler.num_waiting_tokens,
        prefill_tokens_per_s=queue.prompt_tokens_per_s,
        decode_step_s=report.decode_step_s,
        answer_tokens=queue.answer_tokens,
        adapter_loads={tier: each.number for tier, each in loads.counts.items()},
        adapter_load_s={tier: each.seconds for tier, each in loads.counts.items()},
        num_failed_adapter_loads=loads.num_failed,
        itl=report.inter_token_latency(),
    )


def cached_pages(engine: Engine) -> Iterator[CachedPages]:
    """Returns frames with the changes of the prefix cache since the last call. If there were too
    many changes, returns frames with all keys of the cache instead."""
    digest, cache = engine.info.digest, engine.scheduler.kv.prefix_cache
    changes = cache.journal.take()
    if changes is None:
        return changed_pages(digest, cache.keys, (), is_whole=True)
    return changed_pages(digest, *changes)


def check_integrity(engine: Engine, pool: AdapterPool, report: EngineReport) -> None:
    """Checks that every page, allocation and slot has exactly one state. If the check fails, logs
    and counts the failure."""
    scheduler = engine.scheduler
    holders = [*scheduler.running, *scheduler.leaving]
    try:
        scheduler.kv.check_integrity([p for s in holders for p in s.block_table.held_pages])
        pool.check_integrity()
    except IntegrityError:
        report.num_integrity_failures += 1
        log.exception("the memory of %s contradicts itself", engine.info.name)
