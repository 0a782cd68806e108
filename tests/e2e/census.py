"""`python -m tests.e2e.census COMMAND...`: the `loraplex` command, which at a SIGUSR1 writes what
it has in memory, as JSON, to census.json in its data directory."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
from collections import Counter
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType

from loraplex.cli import main

SUSPENDED = (AsyncGeneratorType, CoroutineType, GeneratorType)


def count() -> dict[str, int]:
    """Objects of this process by kind, with those that its start froze: one that takes the place of
    a frozen one does not count as one more."""
    gc.unfreeze()
    gc.collect()
    found = Counter[str]()
    found["tasks"] = len(asyncio.all_tasks())
    found["descriptors"] = len(os.listdir("/proc/self/fd"))
    for each in gc.get_objects():
        if isinstance(each, SUSPENDED):
            found[type(each).__name__] += 1
        elif str(type(each).__module__).startswith("gateway."):
            found[type(each).__qualname__] += 1
    return dict(found)


def write(_number: int, _frame: FrameType | None) -> None:
    path = Path(os.environ["LORAPLEX_DATA_DIR"]) / "census.json"
    path.with_suffix(".part").write_text(json.dumps(count()))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, write)
    main()
