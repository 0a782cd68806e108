"""A gateway whose work beside serving has failed ends, and does not serve on from what it knew."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import asyncpg  # pyright: ignore[reportMissingTypeStubs]
import pytest
from litestar import Litestar

from admin.database import translated_errors
from admin.errors import DatabaseUnavailable
from gateway.server import bind, make_server
from tests.serving import serving


async def test_a_server_ends_with_what_its_app_does_beside_serving() -> None:
    @asynccontextmanager
    async def failing(_app: Litestar) -> AsyncGenerator[None]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_fail())
            yield

    server = make_server(Litestar([], lifespan=[failing]), drain_s=1)
    with bind("127.0.0.1", 0) as listener:
        async with asyncio.timeout(20):
            await server.serve(sockets=[listener])
    assert server.started


async def test_an_idle_connection_is_not_ended_before_its_client_would() -> None:
    """Who ends it must be who begins requests, or one crosses the end of the connection. The
    official client keeps it for five seconds."""
    async with serving(Litestar([])) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for pause_s in (6.0, 0.0):
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = re.findall(rb"content-length: (\d+)", head)
            await reader.readexactly(int(length))
            await asyncio.sleep(pause_s)
        writer.close()
        await writer.wait_closed()


async def _fail() -> None:
    await asyncio.sleep(0.3)
    raise RuntimeError("a defect")


def test_a_connection_lost_in_the_midst_of_a_call_is_a_database_that_is_away() -> None:
    with pytest.raises(DatabaseUnavailable), translated_errors():
        raise asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in")
