"""Parameters of a rotary embedding; torch-free, for modules that only read configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["none", "default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of one table. `factor` stretches positions; the rest is Llama 3's smoothing.

    none: queries and keys stay as they are.
    """

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
