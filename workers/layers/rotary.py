"""Computes rotary embedding tables (Su et al. 2021). Frequencies can be scaled linearly, with the
smoothing of Llama 3, with YaRN (Peng et al. 2023) or with LongRoPE (Ding et al. 2024)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.layers.rope_spec import RopeSpec


def rope_table(spec: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """Computes the table, float32 [num_positions, head_dim]. Each row has the cosines of the angles
    of all pairs of dimensions, followed by the sines of the same angles.

    Pairs of dimensions that are not rotated have angle 0.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(spec, head_dim)[None, :]
    table = torch.stack((angles.cos(), angles.sin()))
    num_rotated = (spec.rotary_dim or head_dim) // 2
    table[:, :, :num_rotated] *= spec.attention_factor
    return torch.cat((table[0], table[1]), dim=1)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Returns the frequency of each pair of dimensions, float32 [head_dim / 2], in radians per
    position."""
    rotary_dim = spec.rotary_dim or head_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    scaled = _scale(1.0 / spec.theta**exponents, spec)
    return torch.nn.functional.pad(scaled, (0, (head_dim - rotary_dim) // 2))


def _scale(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    match spec.rope_type:
        case "none":
            return torch.zeros_like(frequencies)
        case "default":
            return frequencies
        case "linear":
            return frequencies / spec.factor
        case "llama3":
            return _smooth_llama3(frequencies, spec)
        case "yarn":
            return _blend_yarn(frequencies, spec)
        case "longrope":
            return frequencies / torch.tensor(spec.short_factors)


def _smooth_llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Divides low frequencies by `factor`, keeps high frequencies, and blends both results for
    frequencies in between."""
    turns = spec.original_max_positions * frequencies / (2 * math.pi)
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / spec.factor + blend * frequencies


def _blend_yarn(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Divides low frequencies by `factor` and keeps high frequencies. In between, blends both
    results, weighted by the index of the pair of dimensions (YaRN)."""
    rotary_dim = 2 * len(frequencies)

    def pair(turns: float) -> float:
        """Returns the index of the pair of dimensions that makes `turns` full turns over the
        original positions. The index may be fractional."""
        wave = spec.original_max_positions / (turns * 2 * math.pi)
        return rotary_dim * math.log(wave) / (2 * math.log(spec.theta))

    low = max(math.floor(pair(spec.beta_fast)), 0)
    high = min(math.ceil(pair(spec.beta_slow)), rotary_dim - 1)
    index = torch.arange(len(frequencies), dtype=torch.float32)
    stretched = ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return frequencies / spec.factor * stretched + frequencies * (1 - stretched)
