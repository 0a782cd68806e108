"""Children of a supervisor, as real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loraplex.box.children import Child
from loraplex.errors import ChildFailed
from tests.loraplex.box.test_postgres import is_running
from tests.waiting import eventually

POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("draining"), sys.exit(0)))
print("up", flush=True)
time.sleep(600)
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


@asynccontextmanager
async def child(code: str, said: list[str]) -> AsyncIterator[Child]:
    command = [sys.executable, "-c", code]
    one = Child(
        "it",
        command,
        environment=dict(os.environ),
        tell=said.append,
        relay=lambda name, line: said.append(f"{name}: {line}"),
    )
    await one.start()
    try:
        yield one
    finally:
        await one.stop(60)


async def test_it_drains_and_is_not_started_again():
    said: list[str] = []
    async with child(POLITE, said) as one:
        await eventually(lambda: "it: up" in said)
        pid = one.pid
        await one.stop(60)
        assert pid is not None and not is_running(pid)
    assert (said, one.num_starts) == (["it: up", "it: draining"], 1)


async def test_a_deaf_one_is_killed():
    said: list[str] = []
    async with child(DEAF, said) as one:
        await eventually(lambda: "it: up" in said)
        await one.stop(0.2)
    assert said[1:] == ["it: killed, because it did not end within 0.2 s"]
    assert one.pid is not None and not is_running(one.pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGRTMIN + 1])
async def test_a_crashed_one_is_started_again(number: int):
    said: list[str] = []
    async with child(POLITE, said) as one:
        await eventually(lambda: "it: up" in said)
        assert one.pid is not None
        os.kill(one.pid, number)
        await eventually(lambda: said.count("it: up") == 2)
        assert one.num_starts == 2
    assert f"it: ended by signal {number}; starting again in 0.5 s" in said


async def test_one_that_crashes_at_once_never_gets_ready():
    said: list[str] = []
    async with child("print('no way'); raise SystemExit(3)", said) as one:
        with pytest.raises(ChildFailed, match="the it did not start"):
            await one.wait_ready(lambda: False, 20)
    assert said[0] == "it: no way"


async def test_lines_of_any_length_are_read():
    said: list[str] = []
    code = "print('x' * 1_000_000); print('after', flush=True); import time; time.sleep(600)"
    async with child(code, said):
        await eventually(lambda: "it: after" in said)


SUPERVISOR = f"""
import asyncio, os
from loraplex.box.children import Child, python
async def main():
    command = python("-c", {POLITE!r})
    one = Child("it", command, environment=dict(os.environ), tell=print, relay=print)
    await one.start()
    print(one.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_it_does_not_outlive_its_supervisor():
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert is_running(pid)
        supervisor.kill()
    await eventually(lambda: not is_running(pid))
