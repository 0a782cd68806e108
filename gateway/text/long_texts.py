"""Work on long texts, beside the loop: on threads of their own, one at a time for each tenant, so
that no tenant's hold up those of the others, or what other threads are needed for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

LONG = 16 << 10
"""More characters would hold up the loop."""
TOKEN_CHARS = 4
"""An id takes as long to decode as so many characters to encode."""
MIN_THREADS = 2

A = TypeVar("A")


class LongTexts:
    """The long texts of one gateway."""

    def __init__(self, num_threads: int = max(MIN_THREADS, os.cpu_count() or 1)) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "long-texts")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def do(self, domain: str, size: int, work: Callable[[], A]) -> A:
        """Work on a text of `size` characters: at once if it is short, else as `run` does it."""
        return work() if size <= LONG else await self.run(domain, work)

    async def run(self, domain: str, work: Callable[[], A]) -> A:
        """`domain`: of the tenant, or of the group that it shares its cache with. A caller that
        goes away keeps the turn until the work is done, for a thread cannot be stopped."""
        turn = self._turns.setdefault(domain, asyncio.Lock())
        await turn.acquire()
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(running)
