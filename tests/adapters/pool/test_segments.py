from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.layers.segments import build_segments

GROUPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)))


@given(adapted=GROUPS, num_base=st.integers(0, 4))
def test_segments_cover_each_row_with_its_slot(
    adapted: list[tuple[int, int]], num_base: int
) -> None:
    start, slot = build_segments([*adapted, (-1, num_base)])
    rows = [each for each, num_rows in adapted for _ in range(num_rows)]
    sizes = start[1:] - start[:-1]
    assert start[0] == 0 and (sizes > 0).all()
    assert [s for s, n in zip(slot, sizes, strict=True) for _ in range(n)] == rows
    assert (slot[1:] != slot[:-1]).all()


def test_neighbours_are_merged() -> None:
    start, slot = build_segments([(2, 1), (2, 3), (0, 1), (-1, 7)])
    assert start.tolist() == [0, 4, 5]
    assert slot.tolist() == [2, 0]
    assert build_segments([(-1, 4)])[0].tolist() == [0]
