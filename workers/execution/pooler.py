"""Pooling of hidden states into one vector for each prompt."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.copies import to_host, upload
from workers.execution.step_input import Array, PoolInput, SequenceResult, StepInput
from workers.layers.lm_head import Head
from workers.wire.protocol import ErrorCode


class Pooled(NamedTuple):
    """Vectors of a step's `PoolInput`s. sums: sums of hidden states for the P inputs without
    labels, float32 [P, K]. logits: logits of the labels for the Q inputs with labels, float32 [Q,
    largest number of labels]."""

    inputs: list[PoolInput]
    sums: Tensor
    logits: Tensor

    def read_into(self, results: list[SequenceResult]) -> None:
        """Adds the vectors to the sequences' results. Called once the device has copied the vectors
        to the host."""
        sums, logits = iter(self.sums.numpy()), iter(self.logits.numpy())
        for pool in self.inputs:
            vector = next(logits)[: len(pool.labels)] if pool.labels else next(sums)
            if np.isfinite(vector).all():
                results[pool.sequence].vector = vector
            else:
                results[pool.sequence].error = ErrorCode.LOGITS_NAN


def pool(step: StepInput, hidden: Tensor, head: Head) -> Pooled:
    """Computes the vectors of the step's `PoolInput`s and starts their copy to the host.

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
    return Pooled(step.pools, to_host(sums), to_host(logits))


def _tokens(pools: list[PoolInput], firsts: Array) -> Array:
    """Returns the indices of the pooled tokens among the step's tokens, int64. firsts: index of
    each sequence's first token."""
    ranges = [
        np.arange(pool.first, pool.end, dtype=np.int64) + firsts[pool.sequence] for pool in pools
    ]
    return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)
