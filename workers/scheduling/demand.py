"""What an engine asks of the device: the work that waits for its model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """What a model's engine has to do. num_extents: of KV, for its first waiting sequence.
    is_short: the model is here, but that sequence finds no room."""

    num_running: int = 0
    num_waiting: int = 0
    num_extents: int = 0
    is_short: bool = False
