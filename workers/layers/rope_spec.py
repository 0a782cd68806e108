"""Parameters of a rotary embedding. Does not import torch, because this module is imported by
modules that only read configs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

RopeType = Literal["none", "default", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of one rotary table.

    - rope_type: "none" leaves queries and keys unchanged, "default" rotates them with unscaled
      frequencies, and the other types scale the frequencies.
    - rotary_dim: number of dimensions at the start of a head that are rotated. 0 rotates all.
    - factor: factor by which positions are stretched.
    - low_freq_factor, high_freq_factor: bounds of Llama 3's smoothing, in full turns that a pair of
      dimensions makes over the original positions.
    - beta_slow, beta_fast: bounds of YaRN's blending, in the same unit.
    - attention_factor: factor by which cosines and sines are multiplied (YaRN, LongRoPE).
    - short_factors, long_factors: LongRoPE's divisor of each frequency, for texts up to the
      original length and for longer texts.
    """

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    rotary_dim: int = 0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def served(self, max_model_len: int) -> RopeSpec:
        """Returns the parameters for a worker that serves texts of at most `max_model_len` tokens.

        With LongRoPE, texts of all lengths then use the same factors, because keys that are already
        cached cannot be changed when a text grows beyond the original length.
        """
        is_long = max_model_len > self.original_max_positions
        factors = self.long_factors if is_long else self.short_factors
        return replace(self, short_factors=factors, long_factors=factors)
