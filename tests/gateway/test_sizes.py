"""The number of files that a chat passes, and how often it returns to a file, which may only fall.
A change that lowers a number lowers it here too."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import openai
import pytest

from tests.gateway.scripts import say
from tests.gateway.service import Service
from tests.scripted_worker import ScriptedWorker
from tools.source_tree import ROOT

MAX_CHAT_FILES = 48
"""Files of gateway/, web/ and store/ in which a chat request runs code, from its head to its last
byte."""
MAX_RETURNS = 132
"""Times that a chat returns to a file that it has left: it calls a function there for the first
time, while no other function of the file runs. A reader who follows a chat opens a file again as
often."""
FOLDERS = tuple(str(ROOT / name) for name in ("gateway", "web", "store"))


class Walk:
    """Files that a request passes, as a profile function sees them."""

    def __init__(self) -> None:
        self.returns: Counter[str] = Counter()
        """Number of returns to each file."""
        self._running: Counter[str] = Counter()
        self._called: set[object] = set()
        self._last = ""

    def note(self, frame: FrameType, event: str, _value: Any) -> None:
        code = frame.f_code
        file = code.co_filename
        if not file.startswith(FOLDERS):
            return
        if event == "return":
            self._running[file] -= self._running[file] > 0
        elif event == "call":
            if code not in self._called:
                has_left = not self._running[file] and file != self._last
                self.returns[file] += has_left and file in self.returns
                self._called.add(code)
                self._last = file
            self._running[file] += 1


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
def test_files_that_a_chat_passes(
    client: openai.OpenAI, worker: ScriptedWorker, service: Service, *, is_streamed: bool
) -> None:
    worker.script = say("hello")

    def ask() -> None:
        chat: Any = [{"role": "user", "content": "Hi"}]
        answer: Any = client.chat.completions.create(
            model="support-bot", messages=chat, stream=is_streamed
        )
        assert not is_streamed or list(answer)

    ask()
    walks: list[Walk] = []
    for _ in range(3):
        walk = Walk()
        service.call(lambda note=walk.note: sys.setprofile(note))
        try:
            ask()
        finally:
            service.call(lambda: sys.setprofile(None))
        walks.append(walk)
    # Tasks in the background may run meanwhile, but not in each of the three.
    walk = min(walks, key=lambda walk: (len(walk.returns), walk.returns.total()))
    for file, number in sorted(walk.returns.items()):
        print(number, Path(file).relative_to(ROOT))
    print(len(walk.returns), "files,", walk.returns.total(), "returns")
    assert len(walk.returns) <= MAX_CHAT_FILES
    assert walk.returns.total() <= MAX_RETURNS
