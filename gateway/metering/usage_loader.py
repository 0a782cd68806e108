"""Defines the usage record of a request, and loads the records of segments into the database."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from gateway.metering.wal import WriteAheadLog
from gateway.metering.wal_files import frame, split_damaged
from store.database import Database, Invalid
from store.queries import sql


class Status(StrEnum):
    """Outcome of an admitted request."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """The client disconnected, or was disconnected because it did not read the answer."""


class UsageRecord(msgspec.Struct, frozen=True, array_like=True):
    """Usage of a request that has ended. Contains no prompt and no answer.

    Records are encoded by position, so new fields must be added at the end and have a default.
    """

    request_id: str
    """Value of the answer's header `x-request-id`. Older rows lack the prefix `req_`."""
    admitted_at: float
    """Seconds since 1970."""
    tenant_id: str
    key_id: str
    model: str
    """Served name of the base model."""
    adapter: str | None
    adapter_version: int | None
    prompt_tokens: int
    """Number of prompt tokens, including cached ones. Each prompt counts once, even if it has
    several choices."""
    cached_tokens: int
    completion_tokens: int
    ttft_ms: float | None
    """Milliseconds from the request's arrival to the worker's first output. None if there was no
    output."""
    duration_ms: float
    finish_reasons: list[str | None]
    """Finish reason of each choice. None for a choice that did not finish."""
    worker: str
    trace_id: str | None
    status: Status
    gateway: str = ""
    """Holder id of the leases from which the request's tokens and money were reserved."""
    metered_tokens: int = 0
    """Tokens that count against quotas."""
    cost: int = 0
    """Cost of the request in pico-dollars."""
    leased: int = 0
    """Daily and monthly budgets from which the request has reserved amounts, as bits of
    `quota_types.leased_bits`."""
    input_cost: int = 0
    """Cost of the prompt tokens that were not cached. `input_cost`, `cached_input_cost` and
    `output_cost` sum to `cost`, or are 0 in older records."""
    cached_input_cost: int = 0
    output_cost: int = 0


log = logging.getLogger(__name__)

AT_ONCE = 1000
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 60.0
"""Maximum seconds until segments whose bad records could not be set aside are read again. The first
attempt follows after FIRST_PAUSE_S, and the time doubles with each failure."""

MAX_NAMED = 100
"""Maximum number of request ids in one log line."""

_DECODER = msgspec.msgpack.Decoder(UsageRecord)
_REQUEST_ID = re.compile(rb"\xdc\x00[\x10-\x40](?:([\xa1-\xbf])|\xd9(.))([!-~]+)", re.DOTALL)
"""Matches the beginning of a usage record: the head of a msgpack array with 16 to 64 fields, and
the request id as a msgpack text."""


class _Record(NamedTuple):
    payload: bytes
    usage: UsageRecord


class UsageLoader:
    def __init__(
        self,
        database: Database,
        wal: WriteAheadLog,
        release: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        """`release` is called with the id of a gateway that has ended, once all of its usage is
        loaded."""
        self._database = database
        self._wal = wal
        self._release = release
        self._waiting: set[Path] = set()
        """Segments whose good records are loaded, but whose bad records are not set aside yet."""
        self._pause_s = 0.0
        """Seconds to wait after bad records could not be set aside, before the segments in
        `_waiting` are read again."""
        self._again_at = 0.0

    async def load(self) -> None:
        """Loads all records written so far. If it raises ApiError, the next call loads the rest."""
        wal, refused = self._wal, dict[Path, bytes]()
        is_due = time.monotonic() >= self._again_at
        for segment in await wal.on_thread(wal.files.seal):
            if segment in self._waiting and not is_due:
                continue
            loads, aside = await asyncio.to_thread(_read, segment, wal.files.num_bytes_of(segment))
            for records in loads:
                aside += await self._load(records)
            if aside:
                refused[segment] = b"".join(aside)
            else:
                await wal.on_thread(wal.files.remove, segment)
        # Records are set aside last, because the removed segments may have made room on a full
        # disk.
        await self._set_aside(refused)
        for owner in await wal.on_thread(wal.files.emptied):
            await self._release([owner])
            await wal.on_thread(wal.files.drop, owner)

    async def _set_aside(self, refused: dict[Path, bytes]) -> None:
        failure: OSError | None = None
        for segment, data in refused.items():
            try:
                await self._wal.on_thread(self._wal.files.set_aside, segment, data)
            except OSError as error:
                failure = error
                self._waiting.add(segment)
            else:
                log.error("%d bytes of %s are set aside", len(data), segment)
                self._waiting.discard(segment)
        if failure is not None:
            self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LAST_PAUSE_S)
            self._again_at = time.monotonic() + self._pause_s
            log.error(
                "setting records aside failed, reading %d segments again in %g s: %s",
                *(len(self._waiting), self._pause_s, failure),
            )
        elif not self._waiting:
            self._pause_s = 0.0

    async def _load(self, records: Sequence[_Record]) -> list[bytes]:
        """Loads the records. Returns the frames of the records that the database refuses. The other
        records are loaded nevertheless."""
        try:
            await self._store([record.usage for record in records])
        except Invalid as error:
            if len(records) > 1:
                half = len(records) // 2
                return await self._load(records[:half]) + await self._load(records[half:])
            log.error("the usage of request %s is refused: %s", records[0].usage.request_id, error)
            return [frame(records[0].payload)]
        return []

    async def _store(self, records: list[UsageRecord]) -> None:
        # The records are encoded once for all three queries, because encoding blocks the event
        # loop.
        rows = msgspec.Raw(msgspec.json.encode([msgspec.structs.asdict(each) for each in records]))
        async with self._database.transaction() as connection:
            await connection.execute(sql["usage_make_room"], rows)
            await connection.execute(sql["usage_load"], rows)
            num_late: int = await connection.fetchval(sql["usage_late"], rows)
        if num_late:
            log.error("%d requests of days that are no longer kept were not counted", num_late)


def _read(segment: Path, num_synced: int) -> tuple[list[list[_Record]], list[bytes]]:
    """Returns a segment's records in groups of `AT_ONCE`, and the parts of the segment that cannot
    be read, because they are truncated, damaged, or written by another version.

    `num_synced` is the segment's size in bytes when it was written, or when it was taken over from
    another process.
    """
    data = segment.read_bytes()
    if len(data) < num_synced:
        log.error("%s has lost its last %d bytes", segment, num_synced - len(data))
    frames, aside = split_damaged(data)
    for fragment in aside:
        log.error(
            "%s has %d bytes of usage records that a crash cut off or a disk spoilt; requests: %s",
            *(segment, len(fragment), ", ".join(_request_ids(fragment)) or "none can be read"),
        )
    records: list[_Record] = []
    for each in frames:
        try:
            records.append(_Record(each, _DECODER.decode(each)))
        except msgspec.DecodeError as error:
            log.error("%s has a record that cannot be read: %s", segment, error)
            aside.append(frame(each))
    return [records[i : i + AT_ONCE] for i in range(0, len(records), AT_ONCE)], aside


def _request_ids(fragment: bytes) -> list[str]:
    """Returns the ids of the requests whose records begin in the fragment. Omits ids that are
    incomplete."""
    found: list[str] = []
    for match in _REQUEST_ID.finditer(fragment):
        length = match[1][0] & 0x1F if match[1] else match[2][0]
        if len(match[3]) >= length:
            found.append(match[3][:length].decode("ascii"))
    return found[:MAX_NAMED]
