"""Keeps the running generations of each API key, and ends them when the key is no longer valid."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from gateway.dispatch.generation import Generation
from web.errors import Unauthenticated

CHECK_INTERVAL_S = 1.0
NOT_VALID = "This API key is no longer valid."


class RunningGenerations:
    """Set of running generations. Call `add` when a generation begins and `remove` when it ends.
    `run` runs in the background."""

    def __init__(self, is_valid: Callable[[str], bool]) -> None:
        """`is_valid` returns whether the API key with the given id is still valid."""
        self._is_valid = is_valid
        self._by_key: defaultdict[str, set[Generation]] = defaultdict(set)
        """Generations by key id."""

    def add(self, key_id: str, generation: Generation) -> None:
        self._by_key[key_id].add(generation)

    def remove(self, key_id: str, generation: Generation) -> None:
        generations = self._by_key[key_id]
        generations.discard(generation)
        if not generations:
            del self._by_key[key_id]

    async def run(self) -> None:
        """Ends the generations of keys that are no longer valid. Checks every second until
        cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for key_id in [each for each in self._by_key if not self._is_valid(each)]:
                for generation in self._by_key[key_id]:
                    generation.fail(Unauthenticated(NOT_VALID))
