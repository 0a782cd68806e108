"""Records that must outlive this process: appended to a file, one sync for all that wait.

The records that come while the disk syncs, and for a moment after, are gathered for the next sync.
The first after a pause waits for its own alone, the others for two and that moment at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from gateway.metering.wal_files import SpoolFiles
from gateway.segments import frame

log = logging.getLogger(__name__)

SEGMENT_BYTES = 4 << 20
PACE_S = 0.002
"""Between the end of one sync and the next: each is handed to a thread and back, and at a fast disk
there would be one for every few records."""
RETRY_S = 1.0
CLOSE_TIMEOUT_S = 5.0

T = TypeVar("T")


class Batch:
    """Records that reach the disk together."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.failure: OSError | None = None
        self.is_over = asyncio.Event()

    async def synced(self) -> None:
        """Returns when they are on the disk. Raises OSError if they did not get there; then they
        will be tried again."""
        await self.is_over.wait()
        if self.failure is not None:
            raise self.failure


class Spool:
    """`open` it, `append`; who loads the records seals and removes. All in one event loop."""

    def __init__(self, root: Path, owner: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        """`owner` names this process among those that share the folder `root`."""
        self.failure: OSError | None = None
        """Why nothing reaches the disk at present."""
        self._files = SpoolFiles(root, owner, segment_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._gathering = Batch()
        self._committing: asyncio.Task[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Of all that is not loaded yet, what dead processes left included."""
        return self._files.num_bytes

    async def open(self) -> None:
        """Raises OSError, or SpoolTaken."""
        await self._run(self._files.open)

    def append(self, record: bytes) -> Batch:
        """The record will be written whether anybody waits for its batch or not."""
        batch = self._gathering
        batch.frames.append(frame(record))
        if self._committing is None:
            self._committing = asyncio.create_task(self._commit())
        return batch

    async def seal(self) -> list[Path]:
        """Segments to load, oldest first; nothing is added to them any more."""
        return await self._run(self._files.seal)

    def num_bytes_of(self, segment: Path) -> int:
        """Bytes of a sealed segment when it was written, or when it was taken over."""
        return self._files.num_bytes_of(segment)

    async def remove(self, segment: Path) -> None:
        """It is loaded."""
        await self._run(lambda: self._files.remove(segment))

    async def emptied(self) -> list[str]:
        """Processes that died and all of whose records are loaded; to be dropped."""
        return await self._run(self._files.emptied)

    async def drop(self, owner: str) -> None:
        """Forgets one of them."""
        await self._run(lambda: self._files.drop(owner))

    async def set_aside(self, segment: Path, data: bytes) -> None:
        """All but these bytes of it is loaded; they stay, and do not count any more. Raises
        OSError."""
        await self._run(lambda: self._files.set_aside(segment, data))

    async def close(self) -> None:
        """When all is written, or cannot be. What is not loaded stays for who comes next."""
        if self._committing is not None:
            await asyncio.wait([self._committing], timeout=CLOSE_TIMEOUT_S)
        if self._committing is not None:
            self._committing.cancel()
            log.error("records that the disk did not take are lost: %s", self.failure)
        await self._run(self._files.close)
        self._thread.shutdown()

    async def _commit(self) -> None:
        """Batch after batch, until none has gathered."""
        while self._gathering.frames:
            batch, self._gathering = self._gathering, Batch()
            frames = b"".join(batch.frames)
            try:
                await self._run(lambda: self._files.write(frames))  # noqa: B023
                self.failure = None
            except OSError as error:
                log.error("a write to the spool failed: %s", error)
                self.failure = batch.failure = error
                self._gathering.frames[:0] = batch.frames
            batch.is_over.set()
            await asyncio.sleep(PACE_S if self.failure is None else RETRY_S)
        self._committing = None

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
