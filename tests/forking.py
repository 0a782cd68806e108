"""`loraplex` whose own Python processes are forked from it: they need not import torch, which for a
worker takes three seconds of CPU. Run in a process of `tests.preloaded`, as `loraplex.cli` is."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NoReturn

from loraplex.cli import main
from tests.preloaded import Start, become


class ForkingPopen(subprocess.Popen):
    """Runs `python -P -m MODULE` by a fork without an exec; any other command as it is."""

    def __init__(self, args: Any, **options: Any) -> None:
        match args:
            case [sys.executable, "-P", "-m", module, *arguments]:
                options["preexec_fn"] = partial(
                    _run_module,
                    Start(module, arguments, options.get("env") or dict(os.environ), "/", []),
                    options.get("preexec_fn"),
                    options.get("pass_fds", ()),
                )
        super().__init__(args, **options)


def _run_module(
    start: Start, prepare: Callable[[], None] | None, kept: Collection[int]
) -> NoReturn:
    """Called in the child where it would exec; its outputs and folder are set."""
    if prepare is not None:
        prepare()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        # This also tells the parent that its child has started.
        if descriptor > 2 and descriptor not in kept:
            try:
                os.close(descriptor)
            except OSError:
                continue
    asyncio._set_running_loop(None)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    atexit._clear()
    become(start)


if __name__ == "__main__":
    subprocess.Popen = ForkingPopen
    main()
