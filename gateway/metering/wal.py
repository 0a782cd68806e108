"""Write-ahead log (WAL) of records that must survive a crash of this process. Records that are
added during a sync to disk, or within `PACE_S` after it, share the next sync. A record that is
added after a pause waits only for its own sync, and any other record waits for at most two syncs
and `PACE_S`."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from gateway.exceptions import UsageUnavailable
from gateway.metering.wal_files import WalFiles

log = logging.getLogger(__name__)

SEGMENT_BYTES = 4 << 20
PACE_S = 0.002
"""Seconds between two syncs. A sync needs a thread switch, and without the pause a fast disk would
sync after every few records."""
RETRY_S = 1.0
CLOSE_TIMEOUT_S = 5.0

T = TypeVar("T")


class Batch:
    """Records that are written to disk together."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.failure: OSError | None = None
        self.is_over = asyncio.Event()

    async def synced(self) -> None:
        """Waits until the records are on disk. Raises OSError if the write failed. The log then
        writes the records again with its next batch."""
        await self.is_over.wait()
        if self.failure is not None:
            raise self.failure


class WriteAheadLog:
    """Log of usage records. Call `open` first, and `append` for each record. The usage loader seals
    and removes segments on the log's thread. All methods must be called from one event loop."""

    def __init__(
        self,
        root: Path,
        owner: str,
        *,
        max_bytes: int = sys.maxsize,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """`owner` is this process's name, which must be unique among the processes that share the
        folder `root`. At `max_bytes` bytes the log is full, and new requests are refused."""
        self.failure: OSError | None = None
        """Error of the last write or check. None if the last one succeeded."""
        self.files = WalFiles(root, owner, segment_bytes)
        """Files of the log. Used only on the log's thread."""
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="wal")
        self._gathering = Batch()
        self._committing: asyncio.Task[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments that are not loaded into the database yet, including segments taken
        over from ended processes."""
        return self.files.num_bytes

    @property
    def is_full(self) -> bool:
        return self.num_bytes >= self._max_bytes

    def why_unavailable(self) -> str | None:
        """Returns the reason why every request is refused, in words for operators. Returns None if
        usage can be recorded."""
        if self.failure is not None:
            return f"the usage log cannot be written: {self.failure.strerror or self.failure}"
        if self.is_full:
            return "the usage log is full: the database does not take what it holds"
        return None

    def refuse_if_unavailable(self) -> None:
        """Raises UsageUnavailable if the usage of a new request could not be recorded."""
        if self.failure is not None:
            raise UsageUnavailable("Usage cannot be recorded at the moment.")
        if self.is_full:
            raise UsageUnavailable("Too much usage waits to be stored.", code="usage_spool_full")

    async def open(self) -> None:
        """Opens the log. Raises OSError or WalTaken."""
        await self.on_thread(self.files.open)

    def append(self, record: bytes) -> Batch:
        """Adds the record to the next batch, and returns the batch. A batch is written even if it
        is not awaited."""
        batch = self._gathering
        batch.records.append(record)
        if self._committing is None:
            self._committing = asyncio.create_task(self._commit())
        return batch

    async def check(self) -> None:
        """Checks that the disk accepts writes, so that a gateway without requests also notices a
        failure. Raises OSError, after storing it in `failure`. Does nothing while records are being
        written."""
        if self._committing is not None:
            return
        try:
            await self.on_thread(self.files.check)
            self.failure = None
        except OSError as error:
            self.failure = error
            raise

    async def close(self) -> None:
        """Closes the log, after waiting up to `CLOSE_TIMEOUT_S` for the last write. The next
        process loads the segments that are left."""
        if self._committing is not None:
            await asyncio.wait([self._committing], timeout=CLOSE_TIMEOUT_S)
        if self._committing is not None:
            self._committing.cancel()
            log.error("writing the last usage records failed, they are lost: %s", self.failure)
        await self.on_thread(self.files.close)
        self._thread.shutdown()

    async def _commit(self) -> None:
        """Writes batches until no more records are waiting."""
        while self._gathering.records:
            batch, self._gathering = self._gathering, Batch()
            try:
                await self.on_thread(self.files.write, batch.records)
                self.failure = None
            except Exception as error:
                # All exceptions are caught, because the requests that wait for the batch must not
                # wait for ever.
                log.error("writing usage records failed: %r", error)
                self.failure = batch.failure = (
                    error if isinstance(error, OSError) else OSError(str(error))
                )
                self._gathering.records[:0] = batch.records
            batch.is_over.set()
            await asyncio.sleep(PACE_S if self.failure is None else RETRY_S)
        self._committing = None

    async def on_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Runs `work`, a function that uses the files, on the log's thread. Calls run one at a
        time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
