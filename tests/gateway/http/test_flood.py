"""Requests with made-up keys by the thousand: they write nothing, ask the database nothing, and are
forgotten."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from store.records import new_key
from tests.gateway.live import Live
from tests.proxy import PostgresProxy
from tests.scale import scaled

NUM_KEYS = scaled(5_000, 100_000)
NUM_CONNECTIONS = 8
GROWTH_BYTES = 20 << 20
TABLES = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"


def made_up(number: int) -> str:
    """Every other one is well formed; of the rest the checksum is wrong."""
    key = new_key().text
    return key if number % 2 else key[:-1] + ("0" if key[-1] != "0" else "1")


async def count_rows(live: Live) -> dict[str, int]:
    """Of each table, but for the workers that the gateway tells of."""
    tables = [row["table_name"] for row in await live.fetch(TABLES)]
    tables.remove("workers")
    return {
        table: (await live.fetch(f'SELECT count(*) AS n FROM "{table}"'))[0]["n"]
        for table in tables
    }


async def flood(url: str, keys: list[str]) -> int:
    """One request after the other on one connection; how many were answered by 401."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    refused = 0
    for key in keys:
        writer.write(
            f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        refused += head.startswith(b"HTTP/1.1 401")
        length = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
        await reader.readexactly(int(length))
    writer.close()
    await writer.wait_closed()
    return refused


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_made_up_keys_leave_no_trace(live: Live, dsn: str, tmp_path: Path) -> None:
    keys = [made_up(i) for i in range(NUM_KEYS)]
    async with PostgresProxy(dsn, tmp_path / "proxy") as proxy, live.worker:
        gateway = live.process(proxy.dsn)
        await gateway.start()
        try:
            # What the first requests bring into memory is not the flood's.
            await flood(gateway.url, [made_up(i) for i in range(1000)])
            rows, resident = await count_rows(live), gateway.resident_bytes
            assert proxy.said, "the gateway says nothing to its database: the proxy is not between"
            proxy.said.clear()
            refused = await asyncio.gather(
                *(flood(gateway.url, keys[i::NUM_CONNECTIONS]) for i in range(NUM_CONNECTIONS))
            )
            grown = gateway.resident_bytes - resident
        finally:
            await gateway.kill()
        assert sum(refused) == NUM_KEYS
        assert await count_rows(live) == rows
        assert grown < GROWTH_BYTES
        # A key is looked up by its id, whatever the query.
        assert not [key for key in keys if key.split("_")[1].encode() in proxy.said]
    print(f"{NUM_KEYS} made-up keys: memory + {grown >> 10} KiB")
