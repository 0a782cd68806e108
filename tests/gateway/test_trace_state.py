"""What a client's `tracestate` may bring into spans and logs."""

from __future__ import annotations

import logging

import pytest

from gateway.tracing import read_trace_state

VALID = {
    "vendor=1": {"vendor": "1"},
    " a=1 ,\tb=2,, ": {"a": "1", "b": "2"},
    "1tenant@system=a b": {"1tenant@system": "a b"},
    "a_-*/=" + "~" * 256: {"a_-*/": "~" * 256},
    ",".join(f"k{i}=v" for i in range(32)): {f"k{i}": "v" for i in range(32)},
    "": {},
}
INVALID = [
    "vendor",
    "=1",
    "a=",
    "A=1",
    "a=1=2",
    "a=1;\x1b[31mred",
    "a=\x00",
    "a=caf\xe9",
    "a=1,b",
    "a=1,a=2",
    "@system=1",
    "a@b@c=1",
    "tenant@" + "s" * 15 + "=1",
    "a" * 257 + "=1",
    "a=" + "v" * 257,
    "a=1," + "b" * 508 + "=",
    ",".join(f"k{i}=v" for i in range(33)),
]


@pytest.mark.parametrize("text", VALID)
def test_what_the_standard_allows_is_taken(text: str) -> None:
    assert dict(read_trace_state([text])) == VALID[text]


@pytest.mark.parametrize("text", INVALID)
def test_what_it_does_not_is_dropped_whole_and_in_silence(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert dict(read_trace_state([text])) == {}
    assert caplog.records == []


def test_several_headers_are_one_list() -> None:
    assert dict(read_trace_state(["a=1", "b=2,c=3"])) == {"a": "1", "b": "2", "c": "3"}
    assert dict(read_trace_state(["a=1", "a=2"])) == {}
    assert dict(read_trace_state(["a=" + "v" * 200, "b=" + "v" * 200, "c=" + "v" * 200])) == {}
