"""Generations in flight by API key, so that those of a key that is no longer valid end."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from gateway.dispatch.generation import Generation
from gateway.exceptions import Unauthenticated

CHECK_INTERVAL_S = 1.0
NOT_VALID = "This API key is no longer valid."


class RunningGenerations:
    """`add` when a generation begins, `remove` when it has ended, `run` beside them."""

    def __init__(self, is_valid: Callable[[str], bool]) -> None:
        """is_valid: whether the key of this id may still infer."""
        self._is_valid = is_valid
        self._by_key: defaultdict[str, set[Generation]] = defaultdict(set)
        """Key id to its generations."""

    def add(self, key_id: str, generation: Generation) -> None:
        self._by_key[key_id].add(generation)

    def remove(self, key_id: str, generation: Generation) -> None:
        generations = self._by_key[key_id]
        generations.discard(generation)
        if not generations:
            del self._by_key[key_id]

    async def run(self) -> None:
        """Ends the generations of keys that are no longer valid, each second until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for key_id in [each for each in self._by_key if not self._is_valid(each)]:
                for generation in self._by_key[key_id]:
                    generation.fail(Unauthenticated(NOT_VALID))
