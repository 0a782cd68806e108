"""Runs work on long texts in separate threads, one at a time for each tenant, so that no tenant
delays the others or blocks threads that other work needs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

LONG = 16 << 10
"""Maximum number of characters of a text that is processed on the event loop."""
TOKEN_CHARS = 4
"""Number of characters whose encoding takes as long as decoding one token id."""
MIN_THREADS = 2

A = TypeVar("A")


class LongTexts:
    """Thread pool for the long texts of one gateway."""

    def __init__(self, num_threads: int = max(MIN_THREADS, os.cpu_count() or 1)) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "long-texts")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def do(self, domain: str, size: int, work: Callable[[], A]) -> A:
        """Runs `work`, which processes a text of `size` characters. Runs it immediately if the text
        is short, otherwise in a thread."""
        return work() if size <= LONG else await self.run(domain, work)

    async def run(self, domain: str, work: Callable[[], A]) -> A:
        """Runs `work` in a thread. For each `domain` (a tenant or its sharing group), one call runs
        at a time. If the caller is cancelled, the domain's next call still waits until this one has
        finished, because a thread cannot be stopped."""
        turn = self._turns.setdefault(domain, asyncio.Lock())
        await turn.acquire()
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(running)
