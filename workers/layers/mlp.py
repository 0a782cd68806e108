"""The gated feed-forward block."""

from __future__ import annotations

from torch import Tensor

from ops.base import Activation, LoRABatch, Ops
from workers.layers.linear import Linear


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up side by side in one linear."""

    def __init__(self, ops: Ops, activation: Activation, gate_up: Linear, down: Linear) -> None:
        self._ops = ops
        self._activation: Activation = activation
        self._gate_up = gate_up
        self._down = down

    def forward(self, x: Tensor, lora: LoRABatch | None) -> Tensor:
        """[T, K] -> [T, K]."""
        inner = self._ops.gated_activation(self._gate_up.forward(x, lora), self._activation)
        return self._down.forward(inner, lora)
