"""The harness of servers: a start that fails leaves nothing running, and says why."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import plane
from tests.plane import Plane, free_port


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane, "START_TIMEOUT_S", 1.0)


async def test_a_process_that_does_not_become_ready_is_killed(tmp_path: Path) -> None:
    code = "import time; print('not today', flush=True); time.sleep(600)"
    server = Plane(
        [sys.executable, "-c", code], kind="process", port=free_port(), log=tmp_path / "log"
    )
    with pytest.raises(AssertionError, match="not ready in time: not today"):
        await server.start()
    assert not server.is_running


async def test_an_application_that_does_not_become_ready_is_cancelled() -> None:
    async def hang(*_: Any) -> None:
        await asyncio.Event().wait()

    server = Plane(hang)
    with pytest.raises(AssertionError, match="not ready in time"):
        await server.start()
    assert not server.is_running
