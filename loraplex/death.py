"""Ends child processes when their parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def die_with_parent(signum: signal.Signals) -> Callable[[], None] | None:
    """Returns a `preexec_fn` for Popen that makes the kernel send `signum` to the child when its
    parent ends.

    For the kernel, the parent is the thread that starts the child, so start children from a thread
    that lasts. Returns None on systems other than Linux.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def ask_kernel() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask_kernel
