"""Archives made to unpack to more than they may: what is written is bounded."""

from __future__ import annotations

import errno
import io
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from adapters.errors import AdapterRejected
from adapters.format.validator import CONFIG_NAME, MAX_CONFIG_BYTES, PICKLE_NAMES, WEIGHTS_NAME
from admin.uploads.archive import CHUNK_BYTES, StagingFolder, extract
from admin.uploads.validation import Validation
from store.errors import Invalid
from tests.adapters.files import BASE, write_adapter
from web.errors import TooLarge

MAX_BYTES = 4 << 20
Pack = Callable[..., bytes]


class Disk:
    """A disk with so much room; counts what is asked of it."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.asked: list[int] = []

    def check(self, num_bytes: int) -> None:
        self.asked.append(num_bytes)
        if num_bytes > self.room:
            raise OSError(errno.ENOSPC, "no room")


def unpack(folder: Path, data: bytes, disk: Disk | None = None) -> Path:
    """The folder that the archive was extracted to."""
    (folder / "archive").write_bytes(data)
    target = folder / "target"
    target.mkdir()
    extract(folder / "archive", StagingFolder(target, MAX_BYTES, (disk or Disk()).check))
    return target


def num_bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def tarred(**members: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


async def test_all_files_together_have_a_bound(tmp_path: Path) -> None:
    """Four names of which each could once have as many bytes as the whole upload."""
    (tmp_path / "a.zip").write_bytes(
        zipped(**{name: bytes(MAX_BYTES) for name in (WEIGHTS_NAME, *PICKLE_NAMES)})
    )
    (tmp_path / "target").mkdir()
    validation = Validation(256, MAX_BYTES)
    try:
        with pytest.raises(AdapterRejected):
            await validation.validate("t", tmp_path / "target", [BASE], tmp_path / "a.zip")
    finally:
        await validation.close()
    assert num_bytes_in(tmp_path / "target") <= MAX_BYTES


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_more_than_the_bound_is_refused_before_a_byte_is_written(tmp_path: Path, pack) -> None:
    over = {CONFIG_NAME: b"{}", WEIGHTS_NAME: bytes(MAX_BYTES - 1)}
    with pytest.raises(TooLarge):
        unpack(tmp_path, pack(**over))
    assert num_bytes_in(tmp_path / "target") <= 2


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_a_configuration_has_a_bound_of_its_own(tmp_path: Path, pack) -> None:
    with pytest.raises(TooLarge):
        unpack(tmp_path, pack(**{CONFIG_NAME: bytes(MAX_CONFIG_BYTES + 1)}))
    assert num_bytes_in(tmp_path / "target") == 0


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_a_pickle_is_named_and_not_copied(tmp_path: Path, pack) -> None:
    target = unpack(tmp_path, pack(**{PICKLE_NAMES[0]: bytes(2 * MAX_BYTES)}))
    assert [(path.name, path.stat().st_size) for path in target.iterdir()] == [(PICKLE_NAMES[0], 0)]


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_the_disk_is_asked_before_each_chunk(tmp_path: Path, pack) -> None:
    disk = Disk()
    unpack(tmp_path, pack(**{WEIGHTS_NAME: bytes(3 * CHUNK_BYTES)}), disk)
    assert disk.asked[-3:] == [CHUNK_BYTES] * 3
    again = tmp_path / "again"
    again.mkdir()
    with pytest.raises(OSError, match="no room"):
        unpack(again, pack(**{WEIGHTS_NAME: bytes(3 * CHUNK_BYTES)}), Disk(CHUNK_BYTES - 1))
    assert num_bytes_in(again / "target") == 0


async def test_unpacking_leaves_the_disks_reserve(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zipped(**{WEIGHTS_NAME: bytes(MAX_BYTES)}))
    (tmp_path / "target").mkdir()
    validation = Validation(256, MAX_BYTES)
    try:
        with pytest.raises(OSError, match="bytes are free"):
            archive = tmp_path / "a.zip"
            await validation.validate("t", tmp_path / "target", [BASE], archive, 1 << 60)
    finally:
        await validation.close()
    assert num_bytes_in(tmp_path / "target") == 0


@pytest.mark.parametrize("declared", [1000, MAX_BYTES])
def test_a_size_that_the_directory_gives_wrongly_is_refused(tmp_path: Path, declared: int) -> None:
    """Never more than was declared is written, and what is shorter is not taken either."""
    data = bytearray(zipped(**{WEIGHTS_NAME: bytes(2 << 20)}))
    at = data.rindex(b"PK\x01\x02") + 24
    data[at : at + 4] = struct.pack("<I", declared)
    with pytest.raises(Invalid):
        unpack(tmp_path, bytes(data))
    assert num_bytes_in(tmp_path / "target") <= max(declared, 2 << 20)
    if declared == 1000:
        assert num_bytes_in(tmp_path / "target") <= 1000


def test_a_zip64_record_is_counted_whatever_the_plain_one_says(tmp_path: Path) -> None:
    """`zipfile` goes by the ZIP64 record: 2,000 members behind a plain record that says none."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for number in range(2000):
            archive.writestr(f"{number}", "")
    data = file.getvalue()
    *_, num_bytes, start, _ = struct.unpack("<4s4H2LH", data[-22:])
    record = struct.pack(
        "<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 2000, 2000, num_bytes, start
    )
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(data) - 22, 1)
    plain = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(Invalid, match="too many members"):
        unpack(tmp_path, data[:-22] + record + locator + plain)


def test_a_large_archives_zip64_record_is_read(tmp_path: Path) -> None:
    """As `zipfile` writes it above 2 GiB."""
    data = zipped(**{CONFIG_NAME: b"{}"})
    *_, num_bytes, start, _ = struct.unpack("<4s4H2LH", data[-22:])
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, num_bytes, start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(data) - 22, 1)
    target = unpack(tmp_path, data[:-22] + record + locator + data[-22:])
    assert (target / CONFIG_NAME).read_bytes() == b"{}"


ADAPTER = {CONFIG_NAME: b"{}", WEIGHTS_NAME: b"w"}


def inside(folder: str) -> dict[str, bytes]:
    return {f"{folder}/{name}": f"{folder} {name}".encode() for name in ADAPTER}


def unpack_named(folder: Path, data: bytes) -> tuple[bytes, list[str]]:
    """The configuration that was extracted, and what was said of the other files."""
    (folder / "archive").write_bytes(data)
    (folder / "target").mkdir()
    target = StagingFolder(folder / "target", MAX_BYTES, Disk().check)
    named = extract(folder / "archive", target)
    return (folder / "target" / CONFIG_NAME).read_bytes(), named


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_the_other_files_of_an_archive_are_named(tmp_path: Path, pack: Pack) -> None:
    others = {"bot/new_embeddings.safetensors": b"", "bot/x/y.json": b"", "bot/optimizer.pt": b""}
    config, named = unpack_named(tmp_path, pack(**inside("bot"), **others))
    assert config.startswith(b"bot")
    assert named == [
        "not used, although trained weights may be in it: new_embeddings.safetensors",
        "not used: x",
    ]


@pytest.mark.parametrize("pack", [zipped, tarred])
@pytest.mark.parametrize("outer", ["", "out/"])
def test_of_adapters_inside_an_adapter_the_outer_one_is_taken(
    tmp_path: Path, pack: Pack, outer: str
) -> None:
    """Reads files as a trainer writes them, in any order of the archive."""
    first = {f"{outer}{name}": b"outer" for name in ADAPTER}
    members = inside(f"{outer}checkpoint-5") | first | inside(f"{outer}older")
    config, named = unpack_named(tmp_path, pack(**members))
    assert config == b"outer"
    assert named == ["not used: older"]


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_several_adapters_are_listed(tmp_path: Path, pack: Pack) -> None:
    with pytest.raises(Invalid, match=r"send one of the folders x/a, x/b") as refused:
        unpack_named(tmp_path, pack(**inside("x/a"), **inside("x/b")))
    assert refused.value.code == "duplicate_part"


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_the_files_of_one_adapter_may_be_in_two_folders(tmp_path: Path, pack: Pack) -> None:
    members = {f"a/{CONFIG_NAME}": b"{}", f"b/{WEIGHTS_NAME}": b"w", "a/x.json": b"", "y": b""}
    config, named = unpack_named(tmp_path, pack(**members))
    assert config == b"{}"
    assert named == ["not used: x.json"]


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_a_file_may_have_the_name_of_the_adapters_folder(tmp_path: Path, pack: Pack) -> None:
    config, named = unpack_named(tmp_path, pack(bot=b"", **inside("bot")))
    assert config.startswith(b"bot")
    assert named == []


async def test_a_stale_pickle_is_named_by_the_version(tmp_path: Path) -> None:
    write_adapter(tmp_path / "bot")
    files = {name: (tmp_path / "bot" / name).read_bytes() for name in ADAPTER}
    (tmp_path / "a.tar").write_bytes(tarred(**files, **{"adapter_model.bin": b"old"}))
    (tmp_path / "target").mkdir()
    validation = Validation(256, MAX_BYTES)
    try:
        manifest = await validation.validate("t", tmp_path / "target", [BASE], tmp_path / "a.tar")
    finally:
        await validation.close()
    assert any("adapter_model.bin" in warning for warning in manifest.warnings)
