"""A command on a pseudo-terminal, typed at and read as a user does."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import AsyncIterator, Mapping

CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\r")
"""Of colours, of the cursor and of pasting: a test reads the text."""
WAIT_S = 30.0
UP, CTRL_C, CTRL_D = "\x1b[A", "\x03", "\x04"


class Terminal:
    """What the command has written is in `text`; `read_until` looks behind what it found before."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self.text = ""
        self._process = process
        self._master = master
        self._seen = 0
        self._more = asyncio.Event()
        asyncio.get_running_loop().add_reader(master, self._read)

    def _read(self) -> None:
        data = b""
        # The other side closed it.
        with contextlib.suppress(OSError):
            data = os.read(self._master, 1 << 16)
        if data:
            self.text = CONTROLS.sub("", self.text + data.decode(errors="replace"))
        else:
            asyncio.get_running_loop().remove_reader(self._master)
        self._more.set()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    async def read_until(self, words: str) -> str:
        """What was written since the last call, to the end of these words."""
        try:
            async with asyncio.timeout(WAIT_S):
                while (at := self.text.find(words, self._seen)) < 0:
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            raise AssertionError(f"no {words!r} in {self.text[self._seen :]!r}") from None
        begin, self._seen = self._seen, at + len(words)
        return self.text[begin : self._seen]

    async def wait(self) -> int:
        """Its exit status."""
        async with asyncio.timeout(WAIT_S):
            return await self._process.wait()


@contextlib.asynccontextmanager
async def terminal(
    *arguments: str, environment: Mapping[str, str], columns: int = 80
) -> AsyncIterator[Terminal]:
    """`loraplex` with these arguments, as the foreground of a terminal of its own."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loraplex", *arguments),
        env={**environment, "TERM": "xterm"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    opened = Terminal(process, master)
    try:
        yield opened
    finally:
        asyncio.get_running_loop().remove_reader(master)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        os.close(master)
