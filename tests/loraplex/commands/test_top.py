"""`loraplex top` and `loraplex status`: a golden screen, a real terminal, a pipe."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from admin.overview.latencies import Percentiles
from admin.overview.schemas import (
    Held,
    ModelOverview,
    Overview,
    TenantOverview,
    Trouble,
    WorkerOverview,
)
from loraplex.commands.overview_screen import ORDERS, draw
from store.queries import sql
from tests.admin.conftest import Plane
from tests.admin.lifecycle import report, report_worker
from tests.admin.workers.test_workers import STATUS
from tests.loraplex.commands.test_cli import run

SCREEN = Path(__file__).parent / "screens" / "top.txt"
"""At 80 columns; WRITE_SCREENS=1 rewrites it."""
MIB = 1 << 20
NOW = datetime(2026, 11, 25, 12, 0, tzinfo=UTC)
FAST = Percentiles(0.021, 0.08, 0.112)
SLOW = Percentiles(0.4, 1.7, 2.25)


def a_worker(name: str, running: int, tokens_per_s: float, **changes: object) -> WorkerOverview:
    worker = WorkerOverview(
        id=name,
        state="ready",
        reason="",
        num_running=running,
        num_waiting=running // 4,
        tokens_per_s=tokens_per_s,
        itl=FAST,
        resident=["smollm2-135m-instruct"],
        memory={"free": 100 * MIB, "kv": 640 * MIB, "adapters": 27 * MIB, "weights": 2048 * MIB},
        adapters={
            "device": Held(12, 27 * MIB),
            "host": Held(140, 300 * MIB),
            "loading": Held(1, MIB),
        },
    )
    return msgspec.structs.replace(worker, **changes)


def a_model(name: str, on: int, rate: float, ttft: Percentiles | None) -> ModelOverview:
    return ModelOverview(
        name=name,
        num_on_device=on,
        num_running=14 * on,
        num_waiting=3 * on,
        requests_per_s=rate,
        failed=on,
        prompt_tokens_per_s=812 * rate,
        cached_tokens_per_s=300 * rate,
        completion_tokens_per_s=64.5 * rate,
        ttft=ttft,
        itl=FAST if on else None,
    )


def a_tenant(name: str, rate: float, pages: int) -> TenantOverview:
    return TenantOverview(
        id=f"ten_{name}0123",
        name=name,
        requests_per_s=rate,
        tokens_per_s=900 * rate,
        kv_bytes=pages * MIB,
        adapter_bytes=pages * MIB // 9,
    )


OVERVIEW = Overview(
    at=NOW,
    num_tenants=31,
    num_adapters=1204,
    num_workers=3,
    num_gateways=2,
    requests_in_flight=19,
    requests_per_s=12.25,
    prompt_tokens_per_s=9947.0,
    completion_tokens_per_s=790.5,
    ttft=SLOW,
    itl=FAST,
    refusals={"rate_limit_exceeded": 120, "overloaded": 4},
    workers=[
        a_worker("worker-2dd73b86fa34", 4, 80.4),
        a_worker("worker-9c0e11d2a7b5", 20, 710.1, state="draining"),
        a_worker(
            "worker-f00d00000000",
            *(0, 0.0),
            state="lost",
            reason="connection refused",
            itl=None,
            memory=dict.fromkeys(("free", "kv", "adapters", "weights"), 0),
            adapters=dict.fromkeys(("device", "host", "loading"), Held(0, 0)),
        ),
    ],
    models=[
        a_model("smollm2-135m-instruct", 2, 12.0, SLOW),
        a_model("a-model-with-quite-a-long-name-of-forty", 1, 0.25, FAST),
        a_model("gemma3-270m", 0, 0.0, None),
    ],
    tenants=[a_tenant("acme", 8.0, 90), a_tenant("globex", 4.0, 400), a_tenant("initech", 0, 0)],
    troubles=[
        Trouble(place="worker-f00d00000000", code="lost", message="connection refused"),
        Trouble(place="b" * 64, code="adapter.checksum", message="hostile \x1b[31m text"),
        Trouble(
            place="gateway-1",
            code="worker_lost",
            at=NOW - timedelta(minutes=3),
            number=2,
            request_id="req_5f0c",
        ),
    ],
)
BUILTIN = json.loads(msgspec.json.encode(OVERVIEW))


def screen(width: int, key: str = "t", max_rows: int = 50) -> str:
    order = next(order for order in ORDERS if order.key == key)
    console = Console(width=width, file=StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(
            draw(
                BUILTIN,
                title="loraplex on http://127.0.0.1:8000",
                width=width,
                order=order,
                max_rows=max_rows,
            )
        )
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


@pytest.mark.parametrize("width", [80, 160])
def test_the_screen_fits_its_terminal(width: int) -> None:
    drawn = screen(width)
    assert max(len(line) for line in drawn.splitlines()) <= width
    assert "\x1b" not in drawn
    if width == 80:
        if os.environ.get("WRITE_SCREENS"):
            SCREEN.write_text(drawn)
        assert drawn == SCREEN.read_text()


@pytest.mark.parametrize(
    ("key", "models", "workers", "tenants"),
    [
        ("t", ["smol", "a-mo", "gemm"], ["9c0e", "2dd7", "f00d"], ["acme", "glob", "init"]),
        ("m", ["smol", "a-mo", "gemm"], ["2dd7", "9c0e", "f00d"], ["glob", "acme", "init"]),
        ("w", ["smol", "a-mo", "gemm"], ["9c0e", "2dd7", "f00d"], ["acme", "glob", "init"]),
        ("n", ["a-mo", "gemm", "smol"], ["2dd7", "9c0e", "f00d"], ["acme", "glob", "init"]),
    ],
)
def test_a_key_sorts_every_table(
    key: str, models: list[str], workers: list[str], tenants: list[str]
) -> None:
    drawn = screen(100, key)
    places = [
        [drawn.index(f"\n{mark}{name}") for name in names]
        for mark, names in (("", models), ("worker-", workers), ("", tenants))
    ]
    assert all(each == sorted(each) for each in places), drawn


def test_rows_that_do_not_fit_are_counted() -> None:
    drawn = screen(80, max_rows=2)
    assert "and 1 more models" in drawn and "gemma3" not in drawn


LOAD = {
    "seconds": 60.0,
    "requests_in_flight": 3,
    "models": [
        {"model": "tiny", "requests": 120, "prompt_tokens": 6000, "completion_tokens": 600}
        | {"ttft": [[0.1, 60], [0.2, 60]]}
    ],
    "refusals": {"rate_limit_exceeded": 7},
}


@pytest.fixture
async def busy(plane: Plane, base: str) -> Plane:
    """A worker and a gateway that have just reported."""
    await report_worker(plane.database, "w-1", base, seconds_ago=-600, **STATUS)
    await report_worker(plane.database, "w-2", seconds_ago=-600, tokens_per_s=9.0)
    async with plane.database.transaction() as connection:
        await report(connection, "gw-1", 1, {}, seconds_ago=-600)
        await connection.execute(sql["gateway_load_report"], "gw-1", LOAD)
        await connection.execute("UPDATE gateway_load SET reported_at = now() + interval '1 hour'")
    return plane


async def test_a_pipe_gets_one_screen(busy: Plane) -> None:
    for command in (("top", "--once"), ("top",), ("status",)):
        shown = await run(busy, *command)
        assert "7 rate_limit_exceeded" in shown and "2 ready" in shown
        assert "tokens/s: 100 in, 10.0 out" in shown
        assert re.search(r"^tiny +1 +1 +2 +2.0 ", shown, re.MULTILINE), shown
        assert not re.search(r"\x1b| $", shown, re.MULTILINE)
    whole = json.loads(await run(busy, "status", "--json"))
    assert whole["ttft"] == {"p50": 0.1, "p95": 0.19, "p99": 0.198}
    narrow = await run(busy, "top", "--once", COLUMNS="80")
    assert max(len(line) for line in narrow.splitlines()) <= 80
    tenant = await busy.tenant("acme")
    key = tenant.headers["authorization"].removeprefix("Bearer ")
    assert "admin" in await run(busy, "status", code=1, LORAPLEX_KEY=key)


async def test_keys_sort_a_live_screen_and_q_ends_it(busy: Plane) -> None:
    terminal, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    cooked = termios.tcgetattr(its)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loraplex", "top", "--interval", "0.5"),
        env=os.environ
        | {
            "LORAPLEX_URL": busy.url.removesuffix("/admin/v1"),
            "LORAPLEX_KEY": busy.client.headers["authorization"].removeprefix("Bearer "),
            "LORAPLEX_DATA_DIR": "/nonexistent",
            "TERM": "xterm",
        },
        stdin=its,
        stdout=its,
        stderr=its,
    )
    # The last end of it: reading fails when the process has ended.
    os.close(its)
    seen = bytearray()

    async def until(words: bytes) -> None:
        async with asyncio.timeout(60):
            while words not in seen:
                seen.extend(await asyncio.to_thread(os.read, terminal, 4096))

    await until(b"sorted by tokens")
    await until(b"w-1")
    assert seen.index(b"w-2") < seen.index(b"w-1"), "the one with more tokens a second is first"
    seen.clear()
    os.write(terminal, b"n")
    await until(b"sorted by name")
    # Before it there may be a screen of before the key was read.
    del seen[: seen.index(b"sorted by name")]
    await until(b"w-2")
    assert seen.index(b"w-1") < seen.index(b"w-2")
    async with busy.database.transaction() as connection:
        await connection.execute("DELETE FROM workers WHERE id = 'w-2'")
    await until(b"1 ready")
    os.write(terminal, b"q")
    assert await asyncio.wait_for(process.wait(), 60) == 0
    assert termios.tcgetattr(terminal)[3] == cooked[3], "lines and echo are as before"
    os.close(terminal)
