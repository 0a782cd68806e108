"""Pooling of hidden states into the vectors of prompts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ops.copies import to_host, upload
from workers.execution.step_input import Array, PoolInput, StepInput
from workers.layers.lm_head import Head


def pool(step: StepInput, hidden: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Computes the vectors of the step's `PoolInput`s and starts their copy to the host.

    Returns two float32 tensors: for the P inputs without labels, sums of hidden states [P, K]; for
    the Q inputs with labels, logits [Q, largest number of labels].

    hidden [T, K]: hidden states of the step's tokens.
    """
    firsts = step.counts.cumsum() - step.counts
    states = [pool for pool in step.pools if not pool.labels]
    labelled = [pool for pool in step.pools if pool.labels]
    longest = max((len(pool.labels) for pool in labelled), default=0)
    labels = np.zeros((len(labelled), longest), np.int64)
    for row, asked in zip(labels, labelled, strict=True):
        row[: len(asked.labels)] = asked.labels
    arrays = [
        _tokens(states, firsts),
        np.array([pool.end - pool.first for pool in states], np.int64),
        _tokens(labelled, firsts),
        labels,
    ]
    tokens, lengths, judged, label_ids = upload(arrays, hidden.device)
    sums = hidden.new_empty((0, hidden.shape[1]), dtype=torch.float32)
    if states:
        chosen = hidden[tokens].float()
        sums = torch.segment_reduce(chosen, "sum", lengths=lengths, unsafe=True)
    logits = hidden.new_empty((0, longest), dtype=torch.float32)
    if labelled:
        slots = step.adapter_slots[[pool.sequence for pool in labelled]]
        logits = head(hidden[judged], slots).gather(1, label_ids)
    return to_host(sums), to_host(logits)


def read_vectors(pools: list[PoolInput], pooled: tuple[Tensor, Tensor]) -> list[Array]:
    """Returns the vector of each `PoolInput`. pooled: tensors of `pool`, copied to the host."""
    sums, logits = (iter(tensor.numpy()) for tensor in pooled)
    return [next(logits)[: len(pool.labels)] if pool.labels else next(sums) for pool in pools]


def _tokens(pools: list[PoolInput], firsts: Array) -> Array:
    """Returns the indices of the pooled tokens among the step's tokens, int64."""
    ranges = [
        np.arange(pool.first, pool.end, dtype=np.int64) + firsts[pool.sequence] for pool in pools
    ]
    return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)
