"""Builds a scheduler with fair shares and a bounded queue."""

from __future__ import annotations

from adapters.pool.source import AdapterSource
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS
from ops.commands import PendingCommands
from workers.policies.fairness_policy import MAX_TOKEN_GAP_S, FairnessPolicy
from workers.policies.gap_limit import MAX_GAP_RATIO
from workers.policies.queue_limits import QueueBounds
from workers.scheduling.scheduler import Scheduler


def fair_scheduler(
    kv: KVCache,
    adapters: AdapterSource,
    commands: PendingCommands,
    *,
    max_num_seqs: int,
    max_batched_tokens: int,
    max_token_gap_s: float = MAX_TOKEN_GAP_S,
    max_gap_ratio: float = MAX_GAP_RATIO,
    bounds: QueueBounds = QueueBounds(),  # noqa: B008
) -> Scheduler:
    """Returns a scheduler with a `FairnessPolicy`. max_token_gap_s: maximum seconds of a step that
    has generating sequences. max_gap_ratio: `max_ratio` of the policy's `GapLimit`."""
    policy = FairnessPolicy(
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        max_token_gap_s=max_token_gap_s,
        max_gap_ratio=max_gap_ratio,
        bounds=bounds,
        memory_tokens=lambda: kv.num_total * PAGE_TOKENS,
    )
    return Scheduler(
        *(kv, adapters, commands, policy),
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
    )
