"""From the spool into Postgres: each record once, however often its segment is read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from admin.database import Database, Invalid
from admin.queries import sql
from gateway.periodic import repeat
from gateway.segment import read_frames
from gateway.spool import Spool
from gateway.usage import UsageRecord

log = logging.getLogger(__name__)

SHIP_INTERVAL_S = 1.0
RECORDS_AT_ONCE = 1000

_DECODER = msgspec.msgpack.Decoder(UsageRecord)


class Shipper:
    def __init__(
        self,
        database: Database,
        spool: Spool,
        release: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        """`release` is told of gateways that died when all of their usage is loaded."""
        self._database = database
        self._spool = spool
        self._release = release

    async def run(self) -> None:
        """Until cancelled."""
        await repeat("usage waits in the spool", self.ship, SHIP_INTERVAL_S)

    async def ship(self) -> None:
        """All that has been recorded so far. Raises AdminError; the rest stays for another time."""
        for segment in await self._spool.seal():
            try:
                for records in await asyncio.to_thread(_read, segment):
                    await self._load(records)
            except (msgspec.DecodeError, Invalid) as error:
                # It would keep all the others from being loaded, for ever.
                log.error("%s cannot be loaded and is set aside: %s", segment, error)
                await self._spool.set_aside(segment)
            else:
                await self._spool.remove(segment)
        for owner in await self._spool.emptied():
            await self._release([owner])
            await self._spool.drop(owner)

    async def _load(self, records: list[UsageRecord]) -> None:
        # Encoded once for all that take them: the loop stands still meanwhile.
        rows = msgspec.Raw(msgspec.json.encode([msgspec.structs.asdict(each) for each in records]))
        async with self._database.transaction() as connection:
            await connection.execute(sql["usage_make_room"], rows)
            await connection.execute(sql["usage_load"], rows)
            num_late: int = await connection.fetchval(sql["usage_late"], rows)
        if num_late:
            log.error("%d requests of days that are not kept any more are not counted", num_late)


def _read(segment: Path) -> list[list[UsageRecord]]:
    """In loads of some. Raises msgspec.DecodeError for what another version may have written."""
    data = segment.read_bytes()
    frames, num_read = read_frames(data)
    if num_read < len(data):
        log.warning("%s ends torn: %d bytes are no record", segment, len(data) - num_read)
    records = [_DECODER.decode(each) for each in frames]
    return [records[i : i + RECORDS_AT_ONCE] for i in range(0, len(records), RECORDS_AT_ONCE)]
