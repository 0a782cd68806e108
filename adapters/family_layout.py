"""How families lay out their projections where they differ from Llama. Torch-free.

In a canonical folder and in a packed adapter, every family is laid out as Llama: q, k, v, gate and
up are matrices of their own, and row j of a head of q or k is rotated with row j + D / 2.
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
"""Families that rotate row 2 j with row 2 j + 1."""


@lru_cache(maxsize=64)
def head_order(head_dim: int, rotary_dim: int, are_neighbours: bool) -> tuple[int, ...] | None:
    """Returns the family's row of a head for each canonical row; None if all are the same.

    rotary_dim: rows that are rotated, the family's first ones. The others are pairs whose angle is
    0, see `workers.layers.rotary`.
    """
    half = rotary_dim // 2
    if are_neighbours:
        first, second = list(range(0, rotary_dim, 2)), list(range(1, rotary_dim, 2))
    else:
        first, second = list(range(half)), list(range(half, rotary_dim))
    middle = rotary_dim + (head_dim - rotary_dim) // 2
    order = (*first, *range(rotary_dim, middle), *second, *range(middle, head_dim))
    return None if order == tuple(range(head_dim)) else order
