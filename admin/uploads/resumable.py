"""Receives uploads in pieces. Each upload has a folder in the store's incoming area, so that the
upload survives a restart of this process.

The size of the upload's data file is the number of bytes received. Bytes are synced to the disk
before any answer reports them. A folder in the incoming area that is not changed for some time is
removed, so an upload that is not continued expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from adapters.errors import AdapterRejected
from adapters.store.folder import Store, fsync, hold, last_touched
from admin.schemas import shown
from admin.uploads.file_sink import FileSink
from admin.uploads.upload import ARCHIVE_SUFFIXES, check_sha256
from store.errors import Conflict, Invalid, NotFound
from store.records import Caller, random_base62
from web.errors import TooLarge

ID = re.compile(r"upl_[0-9A-Za-z]{24}", re.ASCII)
RECORD, DATA = "upload.json", "data"
MAX_OPEN = 8
"""Maximum number of a tenant's open uploads, because no quota counts incomplete uploads."""


class Record(msgspec.Struct, frozen=True):
    """Contents of an upload's file upload.json."""

    tenant_id: str | None
    """Id of the tenant that created the upload. None for an admin."""
    bytes: int
    filename: str


class PartialUpload(Record, frozen=True, kw_only=True):
    """Upload in pieces, with its state at the time of the query."""

    id: str
    folder: Path
    offset: int
    expires_at: datetime

    @property
    def data(self) -> Path:
        """Path of the file with the bytes received so far, which in the end is the archive."""
        return self.folder / DATA


class ResumableUploads:
    def __init__(self, store: Store, max_bytes: int, idle_s: float) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._creating = asyncio.Lock()

    async def create(self, caller: Caller, num_bytes: int, filename: str) -> PartialUpload:
        """Creates an upload without any bytes. Raises Invalid if the file is neither a .tar nor a
        .zip, TooLarge if it has too many bytes, Conflict if the tenant has too many uploads, and
        OSError if the disk has too little room."""
        if not filename.endswith(ARCHIVE_SUFFIXES):
            raise Invalid("an upload in pieces is a .tar or .zip", "archive_format", "filename")
        if num_bytes > self._max_bytes:
            raise TooLarge(f"an upload may have {self._max_bytes} bytes", param="bytes")
        record = Record(caller.tenant_id, num_bytes, filename)
        async with self._creating:
            return await asyncio.to_thread(self._create, record)

    def _create(self, record: Record) -> PartialUpload:
        self._store.check_room(record.bytes)
        if record.tenant_id is not None and self._count_open(record.tenant_id) >= MAX_OPEN:
            raise Conflict(
                f"this tenant has {MAX_OPEN} uploads under way: complete or delete one",
                "too_many_uploads",
            )
        upload_id = f"upl_{random_base62(24)}"
        folder = self._store.incoming / upload_id
        folder.mkdir(mode=0o700)
        try:
            (folder / DATA).touch()
            (folder / RECORD).write_bytes(msgspec.json.encode(record))
            for made in (folder / DATA, folder / RECORD, folder, folder.parent):
                fsync(made)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return self._read(upload_id)

    def _count_open(self, tenant_id: str) -> int:
        num_open = 0
        for folder in self._store.incoming.glob("upl_*"):
            with contextlib.suppress(FileNotFoundError):
                num_open += self._read(folder.name).tenant_id == tenant_id
        return num_open

    async def find(self, caller: Caller, upload_id: str) -> PartialUpload:
        """Returns an upload. Raises NotFound if it does not exist or belongs to another tenant."""
        missing = NotFound("no such upload, or it has expired", "upload_not_found", "upload")
        if not ID.fullmatch(upload_id):
            raise missing
        try:
            found = await asyncio.to_thread(self._read, upload_id)
        except FileNotFoundError:
            raise missing from None
        if caller.tenant_id not in (None, found.tenant_id):
            raise missing
        return found

    def _read(self, upload_id: str) -> PartialUpload:
        folder = self._store.incoming / upload_id
        touched_at = datetime.fromtimestamp(last_touched(folder), UTC)
        return shown(
            PartialUpload,
            msgspec.json.decode((folder / RECORD).read_bytes(), type=Record),
            id=upload_id,
            folder=folder,
            offset=(folder / DATA).stat().st_size,
            expires_at=touched_at + timedelta(seconds=self._idle_s),
        )

    async def append(
        self,
        caller: Caller,
        upload_id: str,
        offset: int,
        num_bytes: int,
        body: AsyncIterator[bytes],
    ) -> PartialUpload:
        """Appends a piece that starts at `offset` and has `num_bytes` bytes (0 if unknown). If the
        connection breaks, the bytes received so far are kept.

        Raises NotFound, Conflict if the next piece does not start at `offset` or another request
        uses the upload, TooLarge if the upload would exceed its declared bytes (further bytes are
        not kept), Stalled, and OSError.
        """
        await self.find(caller, upload_id)
        with _held(self._store.incoming / upload_id):
            found = await self.find(caller, upload_id)
            check_offset(found, offset)
            left = found.bytes - offset
            if num_bytes > left:
                raise TooLarge(f"{left} bytes are left of those declared", param="bytes")
            sink = FileSink(found.data, left, self._store.check_room, mode="ab")
            with contextlib.closing(sink):
                try:
                    async for chunk in body:
                        await sink.write(chunk)
                finally:
                    await sink.finish(sync=True)
            return await self.find(caller, upload_id)

    @contextlib.asynccontextmanager
    async def completing(
        self, caller: Caller, upload_id: str, sha256: str | None
    ) -> AsyncGenerator[PartialUpload]:
        """Yields a complete upload, and keeps other requests from using it until the block ends.
        Removes the upload at the end of the block or if the adapter is rejected, but keeps it after
        any other error. Raises NotFound, Conflict if the upload is incomplete or in use, and
        Invalid if the checksum differs."""
        await self.find(caller, upload_id)
        with _held(self._store.incoming / upload_id):
            found = await self.find(caller, upload_id)
            check_offset(found, found.bytes)
            if sha256 is not None:
                await check_sha256(sha256, found.data)
            try:
                yield found
            except AdapterRejected:
                await _remove(found.folder)
                raise
            await _remove(found.folder)

    async def delete(self, caller: Caller, upload_id: str) -> None:
        """Deletes an upload. Raises NotFound, or Conflict while another request uses it."""
        found = await self.find(caller, upload_id)
        with _held(found.folder):
            await _remove(found.folder)


def check_offset(upload: PartialUpload, offset: int) -> None:
    """Raises Conflict, with the right offset, unless the next piece starts at `offset`."""
    if offset != upload.offset:
        raise Conflict(
            f"{upload.offset} of {upload.bytes} bytes have come",
            "upload_offset",
            "upload",
            {"offset": upload.offset},
        )


@contextlib.contextmanager
def _held(folder: Path) -> Generator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold(folder))
        except BlockingIOError:
            raise Conflict("another request works on it", "upload_busy", "upload") from None
        except FileNotFoundError:
            raise NotFound("the upload has expired", "upload_not_found", "upload") from None
        yield


async def _remove(folder: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
