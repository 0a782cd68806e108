"""A worker whose command tells the database where it is: workers never speak to it themselves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from admin import workers
from admin.database import EVERYTHING, Database
from admin.errors import AdminError
from loraplex.children import environment_of_child
from loraplex.death import die_with_parent
from loraplex.output import tell
from loraplex.retrying import retry

LEASE_S = 15.0
RENEWALS = 4
"""In the time of a lease."""
LEAVE_S = 5.0


async def run_registered(
    command: Sequence[str], url: str, worker_id: str, address: str, lease_s: float = LEASE_S
) -> int:
    """Runs the worker until it ends, and returns its exit status; signals are passed on to it.

    It is registered all the while. If this process is killed, the worker is too, and the lease runs
    out. Raises AdminError, with the worker ended, if no waiting mends why it cannot be registered.
    """
    # That the database is away is told below, once.
    logging.getLogger("asyncpg.pool").setLevel(logging.ERROR)
    process = await asyncio.create_subprocess_exec(
        *command,
        env=environment_of_child(),
        # Ctrl-C is for this process, which passes it on once.
        start_new_session=True,
        preexec_fn=die_with_parent(signal.SIGKILL),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _pass_on, process, number)
    async with _registered(url, worker_id, address, lease_s) as registering:
        ending = asyncio.create_task(process.wait())
        await asyncio.wait({ending, registering}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            _pass_on(process, signal.SIGTERM)
        code = await ending
        if registering.done():
            registering.result()
    return code if code >= 0 else 128 - code


def _pass_on(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


@asynccontextmanager
async def _registered(
    url: str, worker_id: str, address: str, lease_s: float
) -> AsyncGenerator[asyncio.Task[None]]:
    renewing = asyncio.create_task(_renew(url, worker_id, address, lease_s))
    try:
        yield renewing
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])


async def _renew(url: str, worker_id: str, address: str, lease_s: float) -> None:
    """Until cancelled; with the database away the worker goes on. Raises AdminError if it was never
    reached and waiting does not help."""
    database = await _connect(url)
    is_said = False
    try:
        while True:
            try:
                await workers.register_worker(database, worker_id, address, lease_s)
                is_said = False
            except AdminError as error:
                if not is_said:
                    tell(f"the worker is not registered: {error}")
                is_said = True
            await asyncio.sleep(lease_s / RENEWALS)
    finally:
        with contextlib.suppress(AdminError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await workers.leave(database, worker_id)
        await database.close()


async def _connect(url: str) -> Database:
    return await retry(
        lambda: Database.connect(
            url, sees=EVERYTHING, max_size=1, application_name="loraplex-worker"
        ),
        lambda reason: tell(f"the worker is not registered: {reason}"),
    )
