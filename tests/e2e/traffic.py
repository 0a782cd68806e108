"""Clients of a cluster that go on asking, and know what they must be told."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import openai

from tests.e2e.cluster import Answer, Asked, Cluster


@dataclass(frozen=True)
class Told:
    """A request that was answered as it must be. Times of time.monotonic()."""

    worker: str
    """The first that got it."""
    asked_at: float
    first_at: float
    """Of its first token."""
    longest_wait_s: float
    """For its first or any later token."""


class Traffic:
    """What its clients were told so far. A client asks another gateway where one does not take its
    request; that an answer breaks off is a failure."""

    def __init__(
        self, cluster: Cluster, asked: Sequence[Asked], undisturbed: Sequence[Answer]
    ) -> None:
        self.told: list[Told] = []
        self.failures: list[str] = []
        self.num_refused = 0
        """Connections that a gateway did not take."""
        self.num_cut = 0
        """Those it took, and closed before it answered."""
        self._cluster = cluster
        self._answers = list(zip(asked, undisturbed, strict=True))
        self._numbers = itertools.count()

    @classmethod
    @asynccontextmanager
    async def of(
        cls, cluster: Cluster, asked: Sequence[Asked], num_clients: int, pause_s: float = 0.0
    ) -> AsyncIterator[Traffic]:
        """So many clients, each with one request at a time and so long a pause after it; those that
        are under way at the end are waited for."""
        gateway = next(iter(cluster.gateways))
        undisturbed = await asyncio.gather(*(cluster.ask(gateway, each) for each in asked))
        traffic = cls(cluster, asked, undisturbed)
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as clients:
            for number in range(num_clients):
                clients.create_task(traffic._go_on(number, pause_s, stopping))
            try:
                yield traffic
            finally:
                stopping.set()

    async def answers(self, count: int) -> None:
        """Returns when so many more requests have ended, well or not."""
        wanted = len(self.told) + len(self.failures) + count
        while len(self.told) + len(self.failures) < wanted:
            await asyncio.sleep(0.01)

    async def _go_on(self, client: int, pause_s: float, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            number = next(self._numbers)
            asked, undisturbed = self._answers[number % len(self._answers)]
            try:
                await self._ask(client, asked, undisturbed, salt=str(number))
            except Exception as error:
                self.failures.append(repr(error))
            await asyncio.sleep(pause_s)

    async def _ask(self, client: int, asked: Asked, undisturbed: Answer, salt: str) -> None:
        told_at = [time.monotonic()]

        def note(_: Answer) -> None:
            told_at.append(time.monotonic())

        names = list(self._cluster.gateways)
        for turn in range(len(names)):
            gateway = names[(client + turn) % len(names)]
            try:
                answer = await self._cluster.ask(gateway, asked, salt=salt, on_token=note)
                break
            except openai.APIConnectionError as error:
                # Of either HTTP library that the client may use.
                if type(error.__cause__).__name__ == "ConnectError":
                    self.num_refused += 1
                else:
                    self.num_cut += 1
            except openai.InternalServerError as error:
                # A gateway that ends says so on connections that are open already.
                if error.code != "draining":
                    raise
                self.num_refused += 1
        else:
            raise ConnectionError("no gateway took the request")
        if not answer.says(undisturbed):
            raise ValueError(f"{answer} is not {undisturbed}")
        waits = [after - before for before, after in itertools.pairwise(told_at)]
        self.told.append(Told(answer.worker, told_at[0], told_at[1], max(waits)))
