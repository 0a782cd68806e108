"""Connections inside one process, for tests: `inprocess:NAME` over socket pairs, so that buffers
fill and bytes are bytes as between processes."""

from __future__ import annotations

import asyncio
import socket

from workers.wire.transport.base import Accept, GatewayConnection, Security, WorkerConnection
from workers.wire.transport.stream import READ_LIMIT, gateway_end, worker_end


class InProcessListener:
    def __init__(self, address: str, accept: Accept) -> None:
        self.address = address
        self._accept = accept
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, connection: WorkerConnection) -> None:
        task = asyncio.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: WorkerConnection) -> None:
        await self._accept(connection)

    async def close(self) -> None:
        _LISTENERS.pop(self.address, None)


_LISTENERS: dict[str, InProcessListener] = {}


class InProcessTransport:
    async def connect(self, address: str, security: Security) -> GatewayConnection:
        return gateway_end(*await open_streams(address))

    async def listen(self, address: str, accept: Accept, security: Security) -> InProcessListener:
        if address in _LISTENERS:
            raise OSError(f"{address} is in use")
        listener = _LISTENERS[address] = InProcessListener(address, accept)
        return listener


async def open_streams(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The bare streams of a new connection. Raises ConnectionRefusedError without a listener."""
    listener = _LISTENERS.get(address)
    if listener is None:
        raise ConnectionRefusedError(f"no listener at {address}")
    ours, theirs = socket.socketpair()
    listener.serve(worker_end(*await asyncio.open_connection(sock=theirs, limit=READ_LIMIT)))
    return await asyncio.open_connection(sock=ours, limit=READ_LIMIT)
