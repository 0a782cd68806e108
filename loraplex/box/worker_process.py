"""Supervises the process of `loraplex worker`: restarts it after a crash, stops it at the end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import signal
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from adapters.installing import install_command
from loraplex.box.children import Child, environment_of_child
from loraplex.errors import NotInstalled

START_S = 120.0
"""Seconds after which an exit status no longer counts as a failed start. Settings, store and
address are checked before a worker serves, within half a minute on a busy machine."""

log = logging.getLogger(__name__)


def check_torch() -> None:
    """Raises NotInstalled if torch is not installed. Called before anything is started."""
    if importlib.util.find_spec("torch") is None:
        raise NotInstalled(
            f"a worker needs torch: {install_command('worker')}; for everything on one machine:"
            f" {install_command('serve')}"
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
    worker = _Worker("worker", command, environment=environment_of_child(), tell=log.error)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.pass_on, number)
    if registered is None:
        return await worker.run()
    async with registered as registering:
        running = asyncio.create_task(worker.run())
        await asyncio.wait({running, registering}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            worker.pass_on(signal.SIGTERM)
        code = await running
        if registering.done():
            registering.result()
    return code


class _Worker(Child):
    """Worker process of the command `loraplex worker`."""

    async def run(self) -> int:
        await self._spawn()
        code = await self._keep()
        return code if code >= 0 else 128 - code

    def pass_on(self, number: int) -> None:
        """Passes a signal on. The first one drains the worker, the second one ends it at once."""
        self._stopping.set()
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.send_signal(number)

    def _is_final(self, code: int, lived_s: float) -> bool:
        return code == 0 or (code > 0 and self.num_starts == 1 and lived_s < START_S)
