"""What a writer that died left behind, wherever it was cut."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.segment import MAX_RECORD_BYTES, frame, is_torn, read_frames

RECORDS = st.lists(st.binary(min_size=1, max_size=60), max_size=20)


@given(RECORDS, st.data())
def test_any_cut_keeps_every_whole_record_before_it(
    records: list[bytes], data: st.DataObject
) -> None:
    frames = [frame(record) for record in records]
    whole = b"".join(frames)
    cut = data.draw(st.integers(0, len(whole)))
    ends = [len(b"".join(frames[: i + 1])) for i in range(len(frames))]
    num_whole = sum(end <= cut for end in ends)
    found, num_bytes = read_frames(whole[:cut])
    assert found == records[:num_whole]
    assert num_bytes == (ends[num_whole - 1] if num_whole else 0)
    assert is_torn(whole[num_bytes:cut])


@given(RECORDS, st.binary(max_size=40), st.integers(0, 5000))
def test_zeros_or_the_rest_of_a_record_after_the_last_are_no_record(
    records: list[bytes], torn: bytes, num_zeros: int
) -> None:
    """As file systems leave them when the machine stops between size and content."""
    whole = b"".join(frame(record) for record in records)
    tail = frame(torn + b"x")[:-1] + bytes(num_zeros)
    if tail.startswith(frame(torn + b"\0")):
        return
    assert read_frames(whole + tail)[0] == records
    assert read_frames(whole + bytes(num_zeros)) == (records, len(whole))


@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=10), st.data())
def test_a_flipped_bit_never_makes_another_record(
    records: list[bytes], data: st.DataObject
) -> None:
    whole = bytearray(b"".join(frame(record) for record in records))
    at = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[at // 8] ^= 1 << at % 8
    found, num_bytes = read_frames(bytes(whole))
    assert found == records[: len(found)] and len(found) < len(records)
    # In the length of the last record it may look like a cut.
    is_of_last_length = len(found) == len(records) - 1 and at // 8 - num_bytes < 4
    assert is_of_last_length or not is_torn(bytes(whole[num_bytes:]))


@pytest.mark.parametrize("payload", [b"", b"abc"])
def test_a_length_that_no_record_has_is_no_cut(payload: bytes) -> None:
    for length, is_cut in ((MAX_RECORD_BYTES, True), (MAX_RECORD_BYTES + 1, False)):
        assert is_torn(struct.pack("<II", length, 7) + payload) is is_cut


def test_a_length_with_records_behind_it_is_no_cut() -> None:
    assert not is_torn(struct.pack("<II", 200, 7) + b"x" + frame(b"next"))
