"""`python -m tests.e2e.measured_gateway gateway`: the gateway's command on Python's own event loop,
each of whose sections notes the CPU time of its thread. A section is what runs between two returns
to the loop."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import uvloop

NOTED_S = 0.010
"""Shorter sections are not written down, in seconds."""
SAMPLED_S = 0.020
"""The stack of a section is sampled once it has run for this long, in seconds."""
SECTIONS_FILE = "TEST_SECTIONS_FILE"
"""Environment variable: the file that sections are written to, a line each."""


class Section(msgspec.Struct, order=True):
    cpu_s: float
    """CPU time of the loop's thread, in seconds."""
    stack: str
    """Innermost frames when it had run for a while."""


def read_sections(file: Path) -> list[Section]:
    """The noted sections, the longest first."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    return sorted((msgspec.json.decode(line, type=Section) for line in lines), reverse=True)


class Sections:
    """Measures every event loop that is made from now on."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._loop_thread = threading.get_ident()
        self._began = 0.0
        """Of time.monotonic(): when the running section began; 0 between sections."""
        self._stack = ""

    def start(self) -> None:
        run: Any = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            self._stack, self._began, begin = "", time.monotonic(), time.thread_time()
            run(handle)
            self._began, cpu_s = 0.0, time.thread_time() - begin
            if cpu_s > NOTED_S:
                with self._file.open("ab") as lines:
                    lines.write(msgspec.json.encode(Section(cpu_s, self._stack)) + b"\n")

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        uvloop.new_event_loop = asyncio.new_event_loop  # type: ignore[assignment]
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            time.sleep(SAMPLED_S / 2)
            began = self._began
            if began and not self._stack and time.monotonic() - began > SAMPLED_S:
                frame = sys._current_frames()[self._loop_thread]
                calls = traceback.extract_stack(frame)[-4:]
                self._stack = " < ".join(f"{c.name} {c.filename}:{c.lineno}" for c in calls[::-1])


if __name__ == "__main__":
    Sections(Path(os.environ[SECTIONS_FILE])).start()
    # Only now: what imports take is no section of a loop.
    from loraplex.cli import main

    main()
