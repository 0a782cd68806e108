"""Writes a file from the network, with a limit on its bytes and without blocking the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from web.errors import TooLarge

BLOCK_BYTES = 1 << 20


class FileSink:
    """File that is written in blocks on another thread. Must be closed. After a failure, the file
    keeps the bytes written so far.

    `check_room` is called before each block, so that concurrent uploads together leave the disk's
    reserve free.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        check_room: Callable[[int], None],
        *,
        mode: Literal["xb", "ab"] = "xb",
    ) -> None:
        self.num_bytes = 0
        """Bytes that this sink has written or buffered."""
        self._file = path.open(mode, buffering=0)
        self._max_bytes = max_bytes
        self._check_room = check_room
        self._waiting: list[bytes] = []
        self._num_waiting = 0

    async def write(self, chunk: bytes | bytearray) -> None:
        """Appends a chunk. Raises OSError, or TooLarge without keeping any of the chunk."""
        if self.num_bytes + len(chunk) > self._max_bytes:
            raise TooLarge(f"more than {self._max_bytes} bytes")
        self.num_bytes += len(chunk)
        self._num_waiting += len(chunk)
        self._waiting.append(bytes(chunk))
        if self._num_waiting >= BLOCK_BYTES:
            await asyncio.to_thread(self._flush)

    async def finish(self, *, sync: bool = False) -> None:
        """Writes the buffered bytes. If `sync` is set, syncs the file even if the write fails."""
        try:
            await asyncio.to_thread(self._flush)
        finally:
            if sync:
                await asyncio.to_thread(os.fsync, self._file.fileno())

    def _flush(self) -> None:
        if not self._waiting:
            return
        block = b"".join(self._waiting)
        self._waiting, self._num_waiting = [], 0
        self._check_room(len(block))
        written = 0
        while written < len(block):
            written += self._file.write(memoryview(block)[written:])

    def close(self) -> None:
        self._file.close()
