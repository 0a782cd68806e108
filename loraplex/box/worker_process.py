"""Supervises the process of `loraplex worker`: restarts it when it crashes, and stops it with the
command."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import signal
import time
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from loraplex.box.children import (
    CHILD_FOLDER,
    FIRST_BACKOFF_S,
    LAST_BACKOFF_S,
    STABLE_S,
    environment_of_child,
)
from loraplex.death import die_with_parent
from loraplex.errors import TorchMissing

START_S = 120.0
"""Seconds after which an exit status no longer counts as a failed start. Settings, store and
address are checked before a worker serves, within half a minute on a busy machine."""

log = logging.getLogger(__name__)


def check_torch() -> None:
    """Raises TorchMissing if torch is not installed. Called before anything is started."""
    if importlib.util.find_spec("torch") is None:
        raise TorchMissing(
            "a worker needs torch: pip install 'loraplex[worker]', or 'loraplex[serve]' for"
            " everything on one machine"
        )


async def run_worker(
    command: Sequence[str],
    registered: AbstractAsyncContextManager[asyncio.Task[None]] | None = None,
) -> int:
    """Runs a worker and returns the exit status of its command, which is 0 after a drain and 128 +
    N for signal N.

    Passes SIGTERM and SIGINT on to the worker process, which then ends. Restarts the process after
    any other end, unless its first start fails with an exit status within START_S, because then
    settings, store or address are invalid. If this process is killed, the worker is killed too.

    `registered` keeps the worker registered in the database. If its task fails, the worker is
    drained and the task's exception is raised.
    """
    worker = _Worker(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop, number)
    if registered is None:
        return await worker.run()
    async with registered as registering:
        running = asyncio.create_task(worker.run())
        await asyncio.wait({running, registering}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            worker.stop(signal.SIGTERM)
        code = await running
        if registering.done():
            registering.result()
    return code


class _Worker:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: Process | None = None
        self._stopping = asyncio.Event()

    def stop(self, number: int) -> None:
        """Passes the signal on to the worker. The first signal drains it, the second one ends it at
        once."""
        self._stopping.set()
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.send_signal(number)

    async def run(self) -> int:
        backoff_s, is_first = FIRST_BACKOFF_S, True
        while True:
            started = time.monotonic()
            code = await self._run_once()
            lived_s = time.monotonic() - started
            is_refused = code > 0 and is_first and lived_s < START_S
            if self._stopping.is_set() or code == 0 or is_refused:
                return code if code >= 0 else 128 - code
            if lived_s > STABLE_S:
                backoff_s = FIRST_BACKOFF_S
            why = f"exit status {code}" if code > 0 else signal.Signals(-code).name
            log.error("the worker ended by %s; starting again in %g s", why, backoff_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s):
                    await self._stopping.wait()
                    return 0
            backoff_s, is_first = min(2 * backoff_s, LAST_BACKOFF_S), False

    async def _run_once(self) -> int:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            env=environment_of_child(),
            cwd=CHILD_FOLDER,
            # Ctrl-C must reach only this process, which passes it on once.
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )
        if self._stopping.is_set():
            # The signal arrived while the process was being started.
            self._process.send_signal(signal.SIGTERM)
        return await self._process.wait()
