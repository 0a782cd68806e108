"""Has uploads validated in processes of their own, a few at a time and of each tenant one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import assert_never
from weakref import WeakValueDictionary

import msgspec

from adapters.errors import AdapterRejected
from adapters.manifest import AdapterManifest, BaseModelShape
from admin.errors import Invalid, TooLarge
from admin.uploads.sandbox import (
    MAX_OUTCOME_BYTES,
    Bounds,
    Died,
    DiskFailed,
    Outcome,
    Refused,
    Rejected,
    Task,
    Validated,
)

MAX_VALIDATIONS = 2
GRACE_S = 10.0
"""A sandbox that has not answered so long after its bound is not alive."""
ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""All that a sandbox is told: no secret is there to be read."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
HINTS = {
    "memory": "Validating it takes more memory than any adapter that can be served.",
    "timeout": "Validating it takes longer than any adapter that can be served.",
    "crashed": "Validating it ended without a result.",
}


class Validation:
    """Sandboxes start with the first uploads, live on, and are replaced when they die."""

    def __init__(self, max_rank: int, max_bytes: int, bounds: Bounds | None = None) -> None:
        """`max_bytes`: of an adapter's files together."""
        self._max_rank = max_rank
        self._max_bytes = max_bytes
        self._bounds = bounds or Bounds()
        self._idle: list[_Sandbox] = []
        self._slots = asyncio.Semaphore(MAX_VALIDATIONS)
        self._tenants: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def validate(
        self,
        tenant_id: str,
        folder: Path,
        bases: list[BaseModelShape],
        archive: Path | None = None,
        min_free_bytes: int = 0,
    ) -> AdapterManifest:
        """Validates the files in `folder`, unpacked from `archive` first if there is one; unpacking
        leaves `min_free_bytes` of the disk free.

        Raises AdapterRejected (adapter.validation.{memory,timeout,crashed} if it hit a bound),
        Invalid or TooLarge for an archive that cannot be read, OSError of the disk.
        """
        task = Task(
            folder=str(folder),
            archive=None if archive is None else str(archive),
            bases=bases,
            max_rank=self._max_rank,
            max_bytes=self._max_bytes,
            min_free_bytes=min_free_bytes,
            bounds=self._bounds,
        )
        turn = self._tenants.setdefault(tenant_id, asyncio.Lock())
        async with turn, self._slots:
            return _result(await self._run(task))

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().kill()

    async def _run(self, task: Task) -> Outcome:
        """In a second sandbox if the first dies, such as one killed while idle."""
        for _ in range(2):
            sandbox = self._idle.pop() if self._idle else await _Sandbox.start()
            outcome = None
            try:
                async with asyncio.timeout(task.bounds.wall_s + GRACE_S):
                    outcome = await sandbox.run(task)
            except TimeoutError:
                outcome = None
            finally:
                if outcome is None:
                    await sandbox.kill()
            if outcome is not None:
                self._idle.append(sandbox)
                return outcome
        return Died("crashed")


class _Sandbox:
    """One process of `admin.uploads.sandbox`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> _Sandbox:
        inherited = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        return cls(
            await asyncio.create_subprocess_exec(
                # Nothing is imported from the folder the server was started in.
                *(sys.executable, "-P", "-m", "admin.uploads.sandbox"),
                cwd="/",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=inherited | ONE_THREAD,
                limit=2 * MAX_OUTCOME_BYTES,
                # A group of its own, which ends with it.
                start_new_session=True,
            )
        )

    async def run(self, task: Task) -> Outcome | None:
        """None if it died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(msgspec.json.encode(task) + b"\n")
            await self._process.stdin.drain()
            if (line := await self._process.stdout.readline()).endswith(b"\n"):
                return msgspec.json.decode(line, type=Outcome)
        return None

    async def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


def _result(outcome: Outcome) -> AdapterManifest:
    match outcome:
        case Validated():
            return outcome.manifest
        case Rejected():
            raise AdapterRejected(**msgspec.structs.asdict(outcome))
        case Refused():
            kind = TooLarge if outcome.is_too_large else Invalid
            raise kind(outcome.message, outcome.code, outcome.param)
        case DiskFailed():
            raise OSError(outcome.errno, outcome.message)
        case Died():
            code = f"adapter.validation.{outcome.why}"
            raise AdapterRejected(code, "adapter", hint=HINTS[outcome.why])
        case _:
            assert_never(outcome)
