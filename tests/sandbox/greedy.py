"""A sandbox that takes too much of what it is asked to take: `python -m tests.sandbox.greedy`, with
the argument `in_place` for one that does not fork."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import msgspec

from sandbox.server import serve, serve_in_place

KEPT: list[bytes] = []
"""What tasks in one process have left behind."""


def work(asked: bytes) -> bytes:
    match msgspec.json.decode(asked, type=str):
        case "memory":
            bytearray(256 << 20)
        case "cpu":
            while True:
                pass
        case "time":
            time.sleep(60)
        case "stack":
            _fill_stack()
        case "file":
            with open("/tmp/greedy", "wb") as file:
                file.write(b"x" * 4096)
        case "keep":
            KEPT.append(b"x" * (16 << 20))
        case "kept":
            return msgspec.json.encode(str(len(KEPT)))
        case "pid":
            return msgspec.json.encode(str(os.getpid()))
        case "output":
            return msgspec.json.encode("x" * (2 << 20))
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "native memory":
            os.abort()
        case "error":
            raise ValueError("not for this task")
        case _:
            pass
    return asked


def _fill_stack() -> None:
    """Recurses in native code: qsort calls a comparison that sorts."""
    compared = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    values = (ctypes.c_int * 2)(1, 2)

    @compared
    def compare(_: object, __: object) -> int:
        ctypes.CDLL(None).qsort(values, 2, 4, compare)
        return 0

    compare(None, None)


if __name__ == "__main__":
    (serve_in_place if sys.argv[1:] == ["in_place"] else serve)(work)
