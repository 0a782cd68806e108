"""Finds the process that listens on a port, if Linux shows it to this account."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
LISTENING = "0A"


def find_holder(port: int) -> str | None:
    """Returns the name and id of a process that listens on a port, or None if none is visible."""
    links = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in PROC.glob("[0-9]*") if links else ():
        # Descriptors of other accounts' processes cannot be read, and any process may end in the
        # meantime.
        with contextlib.suppress(OSError):
            if any(str(each.readlink()) in links for each in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
    return None


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]
