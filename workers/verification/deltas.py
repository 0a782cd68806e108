"""What a leased adapter adds to modules, by the ops and tables of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adapters.pool.source import AdapterLease
from ops.base import DeviceEvent, FusedLinear
from workers.execution.batch_builder import build_segments, rank_bound
from workers.execution.model_runner import ModelRunner
from workers.execution.upload import upload


@dataclass(frozen=True, slots=True)
class LaunchedDeltas:
    """Results of `launch_deltas`, one tensor per module, on the host after the event."""

    deltas: list[Tensor]
    event: DeviceEvent


@torch.inference_mode()
def launch_deltas(
    runner: ModelRunner, lease: AdapterLease, layer: int, inputs: list[tuple[FusedLinear, Tensor]]
) -> LaunchedDeltas:
    """Computes what the adapter adds to modules of the layer. Those outside of the layers are in
    the layer after the last one. Does not wait for the device, which may still compute the step in
    flight.

    Shape: x [T, in] of each linear, or token ids [T] of the embedding, the same T
    -> y [T, sum(fused.widths)].
    DType: float32 in and out, ids int32, on the host.
    """
    ops = runner.ops
    if not inputs:
        return LaunchedDeltas([], ops.record_event())
    num_tokens = len(inputs[0][1])
    segments = build_segments([(lease.slot, num_tokens)])
    lora = runner.lora(segments, rank_bound(lease.max_rank))
    rows = upload([x.numpy() for _, x in inputs], ops.device)
    deltas: list[Tensor] = []
    for (fused, _), x in zip(inputs, rows, strict=True):
        dtype = ops.activation_dtype(lora.dtype)
        y = torch.zeros(num_tokens, sum(fused.widths), dtype=dtype, device=ops.device)
        if x.dtype is torch.int32:
            ops.add_embedding_lora(y, x, lora, 1.0)
        else:
            ops.add_lora(y, x.to(dtype), fused, layer, lora)
        deltas.append(y.float().to("cpu", non_blocking=True))
    return LaunchedDeltas(deltas, ops.record_event())
