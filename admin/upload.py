"""An upload as it arrives: form fields to memory, the two files or one archive to a staged folder.

Nothing is named by the uploader: a part or member decides only which of the known files it is.
"""

# multipart carries no types; `Segment` states what is used of its own.
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol, cast

import msgspec
from multipart import (
    MultipartError,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)

from adapters.validator import CONFIG_NAME, WEIGHTS_NAME
from admin.archive import extract
from admin.errors import Invalid, TooLarge

FIELDS = {"name": 1024, "model": 1024, "tenant": 1024, "alias": 1024, "serving": 512 << 10}
"""With the bytes each may have."""
PICKLES = ("adapter_model.bin", "adapter_model.pt")
ARCHIVE = "upload.archive"
ARCHIVE_SUFFIXES = (".tar", ".zip")
MAX_PARTS = 8
OVERHEAD_BYTES = 1 << 20
"""What the multipart framing or an archive may add to the files."""


class Segment(Protocol):
    """The head of a part."""

    name: str | None
    filename: str | None


class Upload(msgspec.Struct):
    """The fields as given; the files lie in the staged folder."""

    name: str = ""
    model: str | None = None
    tenant: str | None = None
    alias: str | None = None
    serving: str | None = None
    """JSON."""


async def receive(
    content_type: str, chunks: AsyncIterator[bytes], staged: Path, max_bytes: int
) -> Upload:
    """Reads a multipart/form-data body to its end. Raises Invalid, TooLarge."""
    kind, options = cast("tuple[str, dict[str, str]]", parse_options_header(content_type))
    if kind != "multipart/form-data" or not options.get("boundary"):
        raise Invalid("send multipart/form-data", "content_type")
    receiver = _Receiver(staged)
    try:
        with _parser(options["boundary"], max_bytes + OVERHEAD_BYTES) as parser:
            async for chunk in chunks:
                events: list[Any] = list(parser.parse(chunk)) if chunk else []
                for event in events:
                    receiver.take(event)
    except ParserLimitReached as error:
        raise TooLarge(f"the upload is too large: {error}") from error
    except (MultipartError, UnicodeDecodeError) as error:
        raise Invalid(f"not valid multipart/form-data: {error}", "multipart") from error
    finally:
        receiver.close()
    await asyncio.to_thread(_settle, staged, max_bytes)
    return receiver.upload


def _parser(boundary: str, max_bytes: int) -> Any:
    return PushMultipartParser(
        boundary, max_segment_count=MAX_PARTS, max_segment_size=max_bytes, strict=True
    )


class _Receiver:
    """Takes the parser's events: a segment, its bytes, then None."""

    def __init__(self, staged: Path) -> None:
        self.upload = Upload()
        self._staged = staged
        self._seen: set[str] = set()
        self._field = ""
        self._text = b""
        self._file: IO[bytes] | None = None

    def take(self, event: Segment | bytes | bytearray | None) -> None:
        if event is None:
            self._end()
        elif not isinstance(event, bytes | bytearray):
            self._begin(event)
        elif self._field:
            self._text += event
            if len(self._text) > FIELDS[self._field]:
                raise Invalid(f"{self._field} is too long", "field_too_long", self._field)
        elif self._file is not None:
            self._file.write(event)

    def _begin(self, segment: Segment) -> None:
        name = segment.name or ""
        is_file = segment.filename is not None
        target = _target(segment) if is_file else name
        if target is None or (not is_file and name not in FIELDS):
            raise Invalid(f"unexpected part {name[:64]!r}", "unexpected_part", name[:64])
        if target in self._seen:
            raise Invalid(f"{target} is there twice", "duplicate_part", target)
        self._seen.add(target)
        if is_file:
            self._file = open(self._staged / target, "xb")  # noqa: SIM115 - closed in _end
        else:
            self._field, self._text = name, b""

    def _end(self) -> None:
        if self._field:
            setattr(self.upload, self._field, self._text.decode() or None)
        self._field = ""
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _target(segment: Segment) -> str | None:
    """Which of the known files a part is, by its file name or the part's name."""
    names = (PurePosixPath(segment.filename or "").name, segment.name or "")
    for name in names:
        if name in (CONFIG_NAME, WEIGHTS_NAME, *PICKLES):
            return name
    return ARCHIVE if names[0].endswith(ARCHIVE_SUFFIXES) else None


def _settle(staged: Path, max_bytes: int) -> None:
    """Unpacks an archive, and gets the bytes onto the disk before the catalog waits for them."""
    archive = staged / ARCHIVE
    if archive.exists():
        if len(list(staged.iterdir())) > 1:
            raise Invalid("send the two files or one archive, not both", "unexpected_part")
        extract(archive, staged, (CONFIG_NAME, WEIGHTS_NAME, *PICKLES), max_bytes)
        archive.unlink()
    for file in staged.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
