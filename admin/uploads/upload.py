"""Receives an upload in one form. Stores the text fields in memory, and the two files or one
archive in a staging folder.

The uploader cannot choose a file's path. A part's name only selects one of the known files.
"""

# The package multipart has no type annotations, so `Segment` declares the attributes used here.
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec
from msgspec.structs import fields
from multipart import (
    MultipartError,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)

from adapters.format.validator import WEIGHTS_NAME
from admin.uploads.archive import KNOWN_FILES, StagingFolder, max_file_bytes
from admin.uploads.file_sink import FileSink
from store.errors import ApiError, Invalid
from store.stored_text import check_text
from web.decoding import find_fault
from web.errors import Overloaded, TooLarge, TooMany

MAX_FIELD_BYTES = 1024
MAX_JSON_BYTES = 512 << 10
"""Maximum bytes of a text field that contains JSON."""
ARCHIVE = "upload.archive"
ARCHIVE_SUFFIXES = (".tar", ".zip")
MULTIPART = "multipart/form-data"
OVERHEAD_BYTES = 1 << 20
"""Maximum bytes that an archive may have in addition to the bytes of its files."""
MAX_FORMS = 64
MAX_FORMS_OF_TENANT = 8
"""Maximum number of forms that one process receives from a tenant at a time, because no quota
counts incomplete uploads."""
WAIT_S = 5.0
"""Seconds for which a form waits until the forms before it have ended."""


T = TypeVar("T", bound=msgspec.Struct)


class Segment(Protocol):
    """Headers of one part of a multipart body."""

    name: str | None
    filename: str | None


class UploadForm(msgspec.Struct, Generic[T], frozen=True):
    """Form with an adapter's files. The form's text fields are the fields of a JSON body."""

    kind: type[T]
    """Struct of the JSON body whose fields the form contains."""
    absent: Mapping[str, str]
    """Values of the body's fields that a form cannot contain, by field name."""

    @property
    def texts(self) -> dict[str, int]:
        """Maximum bytes of each text field, by name. `sha256` is the SHA-256 in hex of the weights
        file, or of the archive if one is sent."""
        kinds = {field.name: field.type for field in fields(self.kind)} | {"sha256": str}
        return {
            name: MAX_JSON_BYTES if kind is msgspec.Raw else MAX_FIELD_BYTES
            for name, kind in kinds.items()
            if name not in self.absent
        }

    @property
    def required(self) -> list[str]:
        names = (field.name for field in fields(self.kind) if field.required)
        return [name for name in names if name not in self.absent]

    def read(self, texts: Mapping[str, str]) -> T:
        """Returns the text fields as the JSON body. A missing field that is required becomes an
        empty text. Raises Invalid if a value is invalid."""
        values: dict[str, Any] = {**dict.fromkeys(self.required, ""), **self.absent}
        for field in fields(self.kind):
            if (text := texts.get(field.name)) is None:
                continue
            if field.type is bool and text.lower() not in ("true", "false"):
                raise Invalid(f"{field.name} is true or false", param=field.name)
            values[field.name] = msgspec.Raw(text.encode()) if field.type is msgspec.Raw else text
        try:
            return msgspec.convert(values, self.kind, strict=False)
        except msgspec.ValidationError as error:
            fault = find_fault(error, self.kind)
            raise Invalid(f"{fault.field}: {fault.reason}", param=fault.field) from None


def media_type(content_type: str) -> tuple[str, dict[str, str]]:
    """Returns the media type of a Content-Type header, and its parameters."""
    return cast("tuple[str, dict[str, str]]", parse_options_header(content_type))


class Forms:
    """Counter of each tenant's uploads in progress. An upload is in progress from the head of its
    request until its answer."""

    def __init__(self) -> None:
        self._num_open: Counter[str | None] = Counter()

    @contextlib.asynccontextmanager
    async def taking(self, tenant_id: str | None) -> AsyncGenerator[None]:
        """Counts an upload until the end of the block. `tenant_id` is None for an admin. Waits up
        to `WAIT_S` seconds while there are too many. Then raises TooMany for too many uploads of
        the tenant, or Overloaded for too many in total."""
        deadline = time.monotonic() + WAIT_S
        while (refusal := self._refusal(tenant_id)) is not None:
            if time.monotonic() > deadline:
                raise refusal
            await asyncio.sleep(0.05)
        self._num_open[tenant_id] += 1
        try:
            yield
        finally:
            self._num_open[tenant_id] -= 1

    def _refusal(self, tenant_id: str | None) -> ApiError | None:
        if tenant_id is not None and self._num_open[tenant_id] >= MAX_FORMS_OF_TENANT:
            reason = f"this tenant has {MAX_FORMS_OF_TENANT} uploads under way"
            return TooMany(reason, "too_many_uploads")
        if self._num_open.total() >= MAX_FORMS:
            return Overloaded(f"{MAX_FORMS} uploads are under way", "too_many_uploads")
        return None


async def receive_form(
    boundary: str,
    chunks: AsyncIterator[bytes],
    staged: StagingFolder,
    form: UploadForm[T],
    check: Callable[[T], Awaitable[None]],
) -> tuple[T, Path | None]:
    """Reads a multipart/form-data body to its end. Returns its text fields as the JSON body, and
    the path of the stored archive, or None if no archive was sent.

    Calls `check` before the first file, with the text fields that precede it. Raises Invalid,
    TooLarge, OSError, and any error of `check`.
    """
    receiver = _Receiver(staged, form, check)
    try:
        parser: Any
        with PushMultipartParser(boundary, strict=True) as parser:
            async for chunk in chunks:
                for event in parser.parse(chunk) if chunk else ():
                    await receiver.take(event)
    except ParserLimitReached as error:
        raise TooLarge(f"the upload is too large: {error}") from error
    except (MultipartError, UnicodeDecodeError) as error:
        raise Invalid(f"not valid multipart/form-data: {error}", "multipart") from error
    finally:
        receiver.close()
    archive = await receiver.archive()
    return receiver.read(), archive


class _Receiver(Generic[T]):
    """Receiver of the multipart parser's events. The events of a part are its head (`Segment`),
    chunks of its bytes, and None at its end."""

    def __init__(
        self, staged: StagingFolder, form: UploadForm[T], check: Callable[[T], Awaitable[None]]
    ) -> None:
        self._form = form
        self._texts: dict[str, str] = {}
        """Text fields that have been received."""
        self._staged = staged
        self._bytes_left = staged.max_bytes + OVERHEAD_BYTES
        self._check = check
        self._seen: set[str] = set()
        self._files: set[str] = set()
        """Known names of the files that have been received."""
        self._part = ""
        self._text = b""
        self._file: FileSink | None = None

    async def take(self, event: Segment | bytes | bytearray | None) -> None:
        if event is None:
            await self._end()
        elif not isinstance(event, bytes | bytearray):
            if event.filename is not None and not self._files:
                await self._check(self.read())
            self._begin(event)
        elif self._file is not None:
            await self._file.write(event)
        else:
            self._text += event
            if len(self._text) > self._form.texts[self._part]:
                raise Invalid(f"{self._part} is too long", "field_too_long", self._part)

    def read(self) -> T:
        """Returns the text fields received so far. Raises Invalid."""
        return self._form.read(self._texts)

    async def archive(self) -> Path | None:
        """Returns the path of the archive, or None if no archive was sent. Checks the SHA-256.
        Raises Invalid."""
        if ARCHIVE in self._files and len(self._files) > 1:
            raise Invalid("send the two files or one archive, not both", "unexpected_part")
        for name in (ARCHIVE, WEIGHTS_NAME):
            if (sha256 := self._texts.get("sha256")) is not None and name in self._files:
                await check_sha256(sha256, self._staged.path / name)
        return self._staged.path / ARCHIVE if ARCHIVE in self._files else None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self, segment: Segment) -> None:
        name = segment.name or ""
        is_file = segment.filename is not None
        part = _target(segment) if is_file else name
        if part is None or (not is_file and name not in self._form.texts):
            raise Invalid(f"unexpected part {name[:64]!r}", "unexpected_part", name[:64])
        if part in self._seen:
            raise Invalid(f"{part} is there twice", "duplicate_part", part)
        self._seen.add(part)
        self._part, self._text = part, b""
        if is_file:
            limit = max_file_bytes(part, self._bytes_left)
            self._file = FileSink(self._staged.path / part, limit, self._staged.check_room)

    async def _end(self) -> None:
        if self._file is None:
            text = self._text.decode()
            check_text(text, self._part)
            if text:
                self._texts[self._part] = text
        else:
            await self._file.finish()
            self._files.add(self._part)
            self._bytes_left -= self._file.num_bytes
            self.close()


async def check_sha256(given: str, path: Path) -> None:
    """Raises Invalid unless the file has this SHA-256 (hex)."""
    found = await asyncio.to_thread(_hash, path)
    if given.lower() != found:
        raise Invalid(
            f"what came has the SHA-256 {found}, not the given one",
            "adapter.upload.sha256",
            "sha256",
        )


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _target(segment: Segment) -> str | None:
    """Returns the name of the known file that a part contains, according to the part's file name or
    its name. Returns None if neither is known."""
    names = (PurePosixPath(segment.filename or "").name, segment.name or "")
    for name in names:
        if name in KNOWN_FILES:
            return name
    return ARCHIVE if names[0].endswith(ARCHIVE_SUFFIXES) else None
