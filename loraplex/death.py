"""Children that do not outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def die_with_parent(signum: signal.Signals) -> Callable[[], None] | None:
    """A Popen `preexec_fn`: the kernel sends `signum` to the child when its parent ends.

    Its parent is the thread that starts it, so start children from one that lasts. None where
    the kernel cannot (it is Linux's own).
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
