"""Rotary embedding tables (Su et al. 2021), with linear and Llama 3 scaling of the frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.layers.rope_spec import RopeSpec


def rope_table(spec: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """float32 [num_positions, head_dim]: cos of each pair's angle, then sin."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(spec, head_dim)[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """float32 [head_dim / 2], radians a position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / spec.theta**exponents
    match spec.rope_type:
        case "none":
            return torch.zeros_like(frequencies)
        case "default":
            return frequencies
        case "linear":
            return frequencies / spec.factor
        case "llama3":
            return _smooth_llama3(frequencies, spec)


def _smooth_llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    turns = spec.original_max_positions * frequencies / (2 * math.pi)
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / spec.factor + blend * frequencies
