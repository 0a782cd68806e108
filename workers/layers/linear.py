"""A linear whose output adapters may add to."""

from __future__ import annotations

from torch import Tensor

from ops.base import PROJECTIONS, LoRABatch, Ops, PackedLinear, Site


class Linear:
    """One site of one layer: the packed base weight, then every row's own adapter."""

    __slots__ = ("_layer", "_ops", "_site", "_weight")

    def __init__(self, ops: Ops, weight: PackedLinear, site: Site, layer: int) -> None:
        self._ops = ops
        self._weight = weight
        self._site = site
        self._layer = layer

    def forward(self, x: Tensor, lora: LoRABatch | None) -> Tensor:
        """x [T, in] -> [T, out]."""
        y = self._ops.linear(x, self._weight)
        if lora is not None:
            self._ops.add_lora(y, x, self._site, self._layer, lora)
        return y


def make_site(in_features: int, **widths: int) -> Site:
    """The site of the named projections, side by side in the order given."""
    projections = tuple(PROJECTIONS.index(name) for name in widths)
    return Site(projections, tuple(widths.values()), in_features)
