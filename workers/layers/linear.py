"""Which projections lie side by side in a linear's output."""

from __future__ import annotations

from ops.base import PROJECTIONS, Site


def make_site(in_features: int, **widths: int) -> Site:
    """The site of the named projections, side by side in the order given."""
    projections = tuple(PROJECTIONS.index(name) for name in widths)
    return Site(projections, tuple(widths.values()), in_features)
