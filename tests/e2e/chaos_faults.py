"""What goes wrong in a chaos run: processes are killed, told to end, held up and started again,
Postgres stops, and the network between gateways and workers fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping

from loraplex.box.postgres import EmbeddedPostgres
from tests.e2e.chaos_log import Healed, Log, Struck, now
from tests.e2e.cluster import Cluster
from tests.plane import Plane
from tests.proxy import FAULTS, TOWARDS, Proxy, Way

NUM_AT_ONCE = 2
DOWN_S = 2.0
"""At most; it takes a start more."""
HELD_UP_S = 6.0
"""At most, which is longer than a worker may be silent."""
PAUSE_S = 1.0
"""At most, between two faults."""

Fault = Callable[[], Awaitable[None]]


class Faults:
    """Each of its faults is of one target, and a target has one at a time."""

    def __init__(
        self,
        cluster: Cluster,
        proxies: Mapping[str, Proxy],
        postgres: EmbeddedPostgres,
        log: Log,
        chance: random.Random,
    ) -> None:
        """proxies: by the worker that gateways reach through it. log: is told of each fault."""
        self._log = log
        self._chance = chance
        self._numbers = itertools.count(1)
        self._faults: list[tuple[str, str, Fault]] = []
        """(kind, target, what it does until all is well again)."""
        for name, worker in cluster.workers.items():
            self._faults += self._of_process("worker", name, worker)
            self._faults.append(("worker-stop", name, lambda w=worker: self._hold_up(w)))
            self._faults += [
                (f"network-{kind}", name, lambda k=kind, p=proxies[name]: self._disturb(k, p))
                for kind in FAULTS
            ]
        for name, gateway in cluster.gateways.items():
            self._faults += self._of_process("gateway", name, gateway)
        self._faults += [("postgres-stop", "postgres", lambda: self._stop(postgres))] * 2
        self._struck: set[str] = set()
        """Targets."""

    async def strike(self, for_s: float) -> None:
        """Returns when all is well again."""
        async with asyncio.timeout(for_s + 600), asyncio.TaskGroup() as tasks:
            for _ in range(NUM_AT_ONCE):
                tasks.create_task(self._strike_on(now() + for_s))

    async def _strike_on(self, until: float) -> None:
        deck: list[tuple[str, str, Fault]] = []
        while now() < until:
            # Each fault of the deck comes before any comes again.
            deck = deck or self._chance.sample(self._faults, len(self._faults))
            kind, target, fault = deck.pop()
            if target not in self._struck:
                await self._strike(kind, target, fault)
                await asyncio.sleep(self._chance.uniform(0, PAUSE_S))

    async def _strike(self, kind: str, target: str, fault: Fault) -> None:
        number = next(self._numbers)
        self._struck.add(target)
        self._log.add(Struck(now(), number, kind, target))
        await fault()
        self._log.add(Healed(now(), number))
        self._struck.discard(target)

    def _of_process(self, role: str, name: str, process: Plane) -> list[tuple[str, str, Fault]]:
        async def kill() -> None:
            await process.kill()
            await asyncio.sleep(self._chance.uniform(0, DOWN_S))
            await _start(process)

        async def end() -> None:
            assert await process.end() == 0
            await _start(process)

        return [(f"{role}-kill", name, kill), (f"{role}-term", name, end)]

    async def _hold_up(self, process: Plane) -> None:
        process.pause()
        await asyncio.sleep(self._chance.uniform(0.1, HELD_UP_S))
        process.resume()

    async def _disturb(self, kind: str, proxy: Proxy) -> None:
        toward = self._chance.choice(TOWARDS)
        until = now() + self._chance.uniform(0.1, HELD_UP_S)
        while now() < until:
            FAULTS[kind](proxy, toward)
            await asyncio.sleep(0.25)
        proxy.set_both(Way())

    async def _stop(self, postgres: EmbeddedPostgres) -> None:
        await asyncio.to_thread(postgres.stop)
        await asyncio.sleep(self._chance.uniform(0, DOWN_S))
        # The server lives as long as the thread that starts it.
        postgres.start()


async def _start(process: Plane) -> None:
    """As a service manager does it: a gateway that finds no Postgres ends, and is started again."""
    while not process.is_running:
        with contextlib.suppress(AssertionError):
            await process.start()
