"""Fused linears, described by the names of their projections."""

from __future__ import annotations

from ops.base import PROJECTIONS, FusedLinear


def fused_linear(in_features: int, **widths: int) -> FusedLinear:
    """Returns the fused linear of the named projections, in the order given. widths: number of
    output columns by name of the projection."""
    projections = tuple(PROJECTIONS.index(name) for name in widths)
    return FusedLinear(projections, tuple(widths.values()), in_features)
