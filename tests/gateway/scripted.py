"""A worker whose answers a test writes, and the clients connected to it."""

from __future__ import annotations

from tests.gateway.scripts import Script, say
from tests.gateway.service import DIGEST
from workers.client import WorkerClient


class ScriptedWorker:
    def __init__(self):
        self.script: Script = say("hello")
        self.requests = []
        self.aborted = []

    def behave(self, g):
        self.requests.append(g)
        return self.script(g)

    async def clients(self):
        c = WorkerClient(self.behave, {DIGEST})
        c.aborted = self.aborted
        return [c]
