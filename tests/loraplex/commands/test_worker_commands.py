"""`loraplex workers` and what `loraplex model` says of them, as processes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.admin.conftest import Plane
from tests.admin.lifecycle import report_worker
from tests.admin.workers.test_workers import STATUS
from tests.loraplex.commands.test_cli import run
from tests.waiting import eventually

AHEAD = -600.0
"""However long the commands take, the report is not too old."""


async def test_workers_are_listed_shown_and_drained(plane: Plane):
    await report_worker(plane.database, "w-1", "b" * 64, seconds_ago=AHEAD, **STATUS)
    await report_worker(plane.database, "w-2", seconds_ago=10)
    table = (await run(plane, "workers", "list")).splitlines()
    assert [line.split()[:2] for line in table[1:]] == [["w-1", "ready"], ["w-2", "lost"]]
    shown = json.loads(await run(plane, "workers", "show", "w-1", "--json"))
    assert shown["adapters"]["device"][0]["digest"] == "1" * 64
    text = await run(plane, "workers", "show", "w-1")
    for words in ("bbbb", "1" * 64, "kw.a", "memory"):
        assert words in text
    drained = await run(plane, "workers", "drain", "w-1")
    assert drained == "w-1 accepts no new requests; 1 requests run there and 2 wait\n"
    shown = json.loads(await run(plane, "workers", "show", "w-1", "--json"))
    assert shown["drain_wanted"] is True
    waiting = asyncio.create_task(run(plane, "workers", "drain", "w-1", "--wait"))
    await asyncio.sleep(3)
    assert not waiting.done()
    draining: dict[str, Any] = STATUS | {"draining": True}
    await report_worker(plane.database, "w-1", seconds_ago=AHEAD, **draining)
    assert await waiting == "w-1 accepts no new requests; 0 requests run there and 0 wait\n"
    assert await run(plane, "workers", "undrain", "w-1") == "w-1 accepts requests again\n"
    await report_worker(plane.database, "w-1", "b" * 64, seconds_ago=AHEAD, **STATUS)
    waiting = asyncio.create_task(run(plane, "workers", "drain", "w-1", "--wait"))
    await eventually(lambda: _is_drained(plane, "w-1"))
    async with plane.database.transaction() as connection:
        await connection.execute("DELETE FROM workers WHERE id = 'w-1'")
    assert await waiting == "w-1 has ended\n"
    assert "no worker" in await run(plane, "workers", "show", "w-9", code=1)


async def _is_drained(plane: Plane, worker: str) -> bool:
    return (await plane.client.get(f"workers/{worker}")).json()["drain_wanted"]


async def test_models_are_pinned_loaded_and_unloaded(plane: Plane, base: str):
    async def model(*arguments: str, code: int = 0) -> str:
        return await run(plane, "model", *arguments, code=code)

    await report_worker(plane.database, "w-1", base, seconds_ago=AHEAD)
    assert await model("pin", "tiny") == "tiny is kept on the device of every worker\n"
    assert await model("load", "tiny") == "tiny is kept on the device of every worker\n"
    assert await model("unpin", "tiny") == "tiny is loaded when a request needs it\n"
    assert await model("unload", "tiny") == "tiny is kept off every device\n"
    assert await model("unpin", "tiny") == "tiny is kept off every device\n"
    assert "unloaded" in await model("list")
    assert await model("load", "tiny") == "tiny is loaded when a request needs it\n"
    shown = await model("show", "tiny")
    assert "w-1" in shown and "device" in shown
    details = json.loads(await model("show", "tiny", "--json"))
    assert [state["worker"] for state in details["workers"]] == ["w-1"]
    assert "no base model" in await model("pin", "other", code=1)
    assert await model("delete", "tiny", "--yes") == "deleted tiny\n"
    assert "no base model" in await model("show", "tiny", code=1)
