"""Device buffers of a model, and the conversion of a `StepInput` to kernel inputs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from ops.base import (
    AdapterTables,
    AttentionBatch,
    DeviceEvent,
    ForwardBatch,
    KVCacheView,
    KVLayout,
    LoRABatch,
)
from ops.commands import ClearSlot, Command, WriteSlot, WriteTokens
from ops.copies import upload
from workers.execution.step_input import Array, StepInput
from workers.layers.segments import build_segments

A = TypeVar("A", Array, Tensor)

RANK_BOUNDS = (16, 64, 256)
"""Upper bounds of adapter ranks, for which kernels are compiled. A step uses the smallest that
fits, or as a graph the one that it was captured for. The device reads the actual ranks."""


class BatchInputs(NamedTuple, Generic[A]):
    """Inputs of a step's kernels: arrays on the host, or tensors on the device.

    buffer_slots int64 [T]      token buffer slot of each token
    buffer_positions int64 [T]  position of each token in its slot
    query_start int32 [S + 1], token_seq int32 [T], positions int32 [T], context_lens int32 [S],
    block_tables int64 [S, P]  as in `AttentionBatch`
    last_tokens int64 [N]      for each sampled sequence, index of its last token in the T tokens
    segment_start int32 [G + 1], segment_slot int32 [G]   as in `LoRABatch`; G is 0 without adapters
    sampled_start int32 [G + 1]   like `segment_start`, but counts sampled sequences, because the
                               output matrix computes one row per sampled sequence
    """

    buffer_slots: A
    buffer_positions: A
    query_start: A
    token_seq: A
    positions: A
    context_lens: A
    block_tables: A
    last_tokens: A
    segment_start: A
    segment_slot: A
    sampled_start: A


@dataclass(frozen=True, slots=True)
class StepShape:
    """Maximum sizes in a step, known on the host (see `AttentionBatch` and `LoRABatch`)."""

    max_query: int
    max_context: int
    max_rank: int


@dataclass(slots=True)
class ModelBuffers:
    """Device buffers of one model. Only the model's runner writes to them, except that copies on
    side streams fill parts of the arena that no step reads yet.

    arena   uint8 [bytes]                  memory of KV pages and adapters. No sequence uses its
                                           first page
    tokens  int32 [slots, max_model_len]   token ids of running sequences. The sampler writes drawn
                                           tokens, which the next step reads, so that they need not
                                           be copied to the host between two steps
    tables                                 locations of adapters in the arena
    copies  events by adapter slot         end of the copy of each slot's adapter to the arena
    """

    arena: Tensor
    tokens: Tensor
    tables: AdapterTables
    copies: dict[int, DeviceEvent] = field(default_factory=dict[int, DeviceEvent])

    def apply(self, command: Command) -> None:
        """Applies the command after the work submitted so far. Does not block. Applying it twice
        has the same effect as applying it once."""
        slot, tables, device = command.slot, self.tables, self.tokens.device
        match command:
            case WriteTokens(position=start):
                (tokens,) = upload([command.tokens], device)
                self.tokens[slot, start : start + len(tokens)] = tokens
            case WriteSlot():
                self.copies[slot].wait()
                entries = upload([command.a_offset, command.b_offset, command.rank], device)
                tables.a_offset[slot], tables.b_offset[slot], tables.rank[slot] = entries
                tables.replaced.pop(slot, None)
                if command.replaced:
                    tables.replaced[slot] = command.replaced
            case ClearSlot():
                tables.rank[slot] = 0
                tables.replaced.pop(slot, None)

    def forward_batch(
        self, inputs: BatchInputs[Tensor], shape: StepShape, layout: KVLayout
    ) -> ForwardBatch:
        """Builds the batch of a forward pass. Token ids are gathered on the device, because the
        host may not know the most recently drawn tokens yet."""
        lora = None
        if len(inputs.segment_slot):
            lora = LoRABatch(
                arena=self.arena,
                dtype=layout.dtype,
                tables=self.tables,
                segment_start=inputs.segment_start,
                segment_slot=inputs.segment_slot,
                max_rank=shape.max_rank,
            )
        attention = AttentionBatch(
            query_start=inputs.query_start,
            token_seq=inputs.token_seq,
            positions=inputs.positions,
            context_lens=inputs.context_lens,
            block_tables=inputs.block_tables,
            max_query=shape.max_query,
            max_context=shape.max_context,
        )
        sample_lora = lora and replace(lora, segment_start=inputs.sampled_start)
        input_ids = self.tokens[inputs.buffer_slots, inputs.buffer_positions]
        view = KVCacheView(self.arena, layout)
        return ForwardBatch(input_ids, attention, view, lora, sample_lora)


def build_inputs(step: StepInput) -> tuple[BatchInputs[Array], StepShape]:
    """Builds the kernel inputs of a step, with tokens in the order of the step's sequences."""
    counts, starts = step.counts, step.starts
    num_sequences = len(counts)
    query_start = np.zeros(num_sequences + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    token_seq = np.repeat(np.arange(num_sequences, dtype=np.int32), counts)
    positions = (
        np.arange(query_start[-1], dtype=np.int32) - query_start[token_seq] + starts[token_seq]
    )
    context = starts + counts
    groups = list(zip(step.adapter_slots.tolist(), counts.tolist(), strict=True))
    segment_start, segment_slot = build_segments(groups)
    sampled = np.fromiter((sample.sequence for sample in step.samples), np.int64, len(step.samples))
    last_tokens = query_start[sampled + 1].astype(np.int64) - 1
    inputs = BatchInputs[Array](
        buffer_slots=step.sequence_slots[token_seq],
        buffer_positions=positions.astype(np.int64),
        query_start=query_start,
        token_seq=token_seq,
        positions=positions,
        context_lens=context,
        block_tables=step.block_tables,
        last_tokens=last_tokens,
        segment_start=segment_start,
        segment_slot=segment_slot,
        # `last_tokens` is ascending, because samples are in the order of the sequences.
        sampled_start=np.searchsorted(last_tokens, segment_start).astype(np.int32),
    )
    return inputs, StepShape(int(counts.max()), int(context.max()), rank_bound(step.max_rank))


def rank_bound(max_rank: int) -> int:
    """Returns the rank bound of a step with adapters up to `max_rank`, or 0 without adapters."""
    fitting = [bound for bound in (0, *RANK_BOUNDS) if bound >= max_rank]
    return fitting[0] if fitting else 1 << (max_rank - 1).bit_length()


def rank_bounds(max_rank: int) -> list[int]:
    """Returns all rank bounds of steps with adapters up to `max_rank`, in ascending order."""
    return sorted({rank_bound(rank) for rank in range(1, max_rank + 1)})
