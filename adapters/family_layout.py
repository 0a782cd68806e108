"""Layouts of the projections of model families that differ from Llama. Torch-free.

In a canonical folder and in a packed adapter, every family has Llama's layout: q, k, v, gate and up
are separate matrices, and row j of a head of q or k is rotated together with row j + D / 2 (D is
the head size).
"""

from __future__ import annotations

from functools import lru_cache

JOINED: dict[str, dict[str, tuple[str, ...]]] = {
    "phi3": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    "glm": {"gate_up_proj": ("gate_proj", "up_proj")},
    "glm4": {"gate_up_proj": ("gate_proj", "up_proj")},
}
"""Joined modules of each family, with the projections whose rows they contain, in order."""

NEIGHBOURS = ("glm", "glm4")
"""Families that rotate row 2 j of a head together with row 2 j + 1."""


@lru_cache(maxsize=64)
def head_order(head_dim: int, rotary_dim: int, are_neighbours: bool) -> tuple[int, ...] | None:
    """Returns, for each canonical row of a head, the index of this row in the family's layout.
    Returns None if both layouts are equal.

    rotary_dim: number of rows that are rotated. In the family's layout, these are the first rows of
    the head. The other rows form pairs whose rotation angle is 0 (see `workers.layers.rotary`).
    """
    half = rotary_dim // 2
    if are_neighbours:
        first, second = list(range(0, rotary_dim, 2)), list(range(1, rotary_dim, 2))
    else:
        first, second = list(range(half)), list(range(half, rotary_dim))
    middle = rotary_dim + (head_dim - rotary_dim) // 2
    order = (*first, *range(rotary_dim, middle), *second, *range(middle, head_dim))
    return None if order == tuple(range(head_dim)) else order
