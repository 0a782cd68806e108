"""The number of files that a chat passes, which may only fall. A change that lowers it lowers its
number here too."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import openai

from tests.gateway.scripts import say
from tests.gateway.service import Service
from tests.scripted_worker import ScriptedWorker
from tools.source_tree import ROOT

MAX_CHAT_FILES = 50
"""Files of gateway/, web/ and store/ in which a chat request runs code, from its head to its last
byte."""


def test_files_that_a_chat_passes(
    client: openai.OpenAI, worker: ScriptedWorker, service: Service
) -> None:
    worker.script = say("hello")
    folders = tuple(str(ROOT / name) for name in ("gateway", "web", "store"))
    passed: set[str] = set()

    def note(frame: FrameType, _event: str, _value: Any) -> None:
        if frame.f_code.co_filename.startswith(folders):
            passed.add(frame.f_code.co_filename)

    def ask() -> None:
        chat: Any = [{"role": "user", "content": "Hi"}]
        stream = client.chat.completions.create(model="support-bot", messages=chat, stream=True)
        assert list(stream)

    ask()
    sizes: list[int] = []
    for _ in range(3):
        passed.clear()
        service.call(lambda: sys.setprofile(note))
        try:
            ask()
        finally:
            service.call(lambda: sys.setprofile(None))
        print(*sorted(str(Path(name).relative_to(ROOT)) for name in passed), sep="\n")
        sizes.append(len(passed))
    # Tasks in the background may run meanwhile, but not in each of the three.
    assert min(sizes) <= MAX_CHAT_FILES
