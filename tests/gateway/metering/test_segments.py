"""What a writer that died left behind, wherever it was cut."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from gateway.metering.wal_files import MAX_RECORD_BYTES, frame, read_frames, split_damaged

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
    rest = whole[num_bytes:cut]
    assert split_damaged(whole[:cut]) == (found, [rest] if rest.strip(b"\0") else [])


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
def test_a_flipped_bit_spoils_one_record_and_leaves_its_bytes(
    records: list[bytes], data: st.DataObject
) -> None:
    frames = [frame(record) for record in records]
    spoilt = data.draw(st.integers(0, len(frames) - 1))
    changed = bytearray(frames[spoilt])
    at = data.draw(st.integers(0, 8 * len(changed) - 1))
    changed[at // 8] ^= 1 << at % 8
    whole = b"".join((*frames[:spoilt], bytes(changed), *frames[spoilt + 1 :]))
    assert split_damaged(whole) == (records[:spoilt] + records[spoilt + 1 :], [bytes(changed)])


def test_a_length_that_no_record_has_is_passed_over() -> None:
    head = struct.pack("<II", MAX_RECORD_BYTES + 1, 7) + b"x"
    assert split_damaged(head + frame(b"next")) == ([b"next"], [head])
