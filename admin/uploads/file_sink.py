"""A file as it arrives from the network: bounded, and written off the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from web.errors import TooLarge

BLOCK_BYTES = 1 << 20


class FileSink:
    """Close it. Its file keeps what was written when something fails.

    `check_room` is asked before each block, so that many uploads at once keep the reserve too.
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
        """Written by this sink, or waiting to be."""
        self._file = path.open(mode, buffering=0)
        self._max_bytes = max_bytes
        self._check_room = check_room
        self._waiting: list[bytes] = []
        self._num_waiting = 0

    async def write(self, chunk: bytes | bytearray) -> None:
        """Raises TooLarge, with nothing of the chunk kept, or OSError."""
        if self.num_bytes + len(chunk) > self._max_bytes:
            raise TooLarge(f"more than {self._max_bytes} bytes")
        self.num_bytes += len(chunk)
        self._num_waiting += len(chunk)
        self._waiting.append(bytes(chunk))
        if self._num_waiting >= BLOCK_BYTES:
            await asyncio.to_thread(self._flush)

    async def finish(self, *, sync: bool = False) -> None:
        """Writes what waits; `sync`: it is on the disk, even if this raises."""
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
