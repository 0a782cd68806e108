"""Records on the disk: before anybody is told, and after whoever wrote them has died."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.metering.wal import RETRY_S, Spool
from gateway.metering.wal_files import SpoolTaken
from gateway.segments import read_frames

WRITER = """
import asyncio, sys
from pathlib import Path
from gateway.metering.wal import Spool
async def main():
    spool = Spool(Path(sys.argv[1]), "dying", segment_bytes=200)
    await spool.open()
    for i in range(100_000):
        await spool.append(b"%d" % i).synced()
        print(i, flush=True)
asyncio.run(main())
"""


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[Spool]:
    spool = Spool(tmp_path, "gateway-1", segment_bytes=1000)
    await spool.open()
    yield spool
    await spool.close()


def records(segments: list[Path]) -> list[bytes]:
    return [record for path in segments for record in read_frames(path.read_bytes())[0]]


async def test_all_come_out_in_order_and_are_gone_when_loaded(spool: Spool) -> None:
    given = [b"record %d" % i for i in range(500)]
    await asyncio.gather(*(spool.append(record).synced() for record in given))
    segments = await spool.seal()
    assert records(segments) == given
    assert spool.num_bytes == sum(path.stat().st_size for path in segments)
    await spool.append(b"later").synced()
    assert len(records(segments)) == 500
    for segment in segments:
        await spool.remove(segment)
    assert records(await spool.seal()) == [b"later"]


async def test_those_that_wait_share_a_sync(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[int] = []

    def slow(file: int) -> None:
        syncs.append(file)
        time.sleep(0.02)

    monkeypatch.setattr(os, "fdatasync", slow)
    await asyncio.gather(*(spool.append(b"x").synced() for _ in range(200)))
    assert len(syncs) <= 3
    assert len(records(await spool.seal())) == 200


async def test_a_disk_that_fails_is_told_and_tried_again(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record counts once more when the disk takes it, and nothing that was there is lost."""
    await spool.append(b"before").synced()
    num_tries = 0

    def full(*_: object) -> int:
        nonlocal num_tries
        num_tries += 1
        time.sleep(0.05)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", full)
        amid = spool.append(b"amid")
        while not num_tries:
            await asyncio.sleep(0)
        after = spool.append(b"after")
        with pytest.raises(OSError, match="No space"):
            await amid.synced()
        assert spool.failure is not None
        await asyncio.sleep(RETRY_S / 2)
        assert num_tries == 1
    async with asyncio.timeout(20):
        await after.synced()
    assert spool.failure is None
    assert records(await spool.seal()) == [b"before", b"amid", b"after"]


async def test_a_disk_that_takes_little_at_a_time_gets_all(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:7], at))
    given = [b"record %d" % i for i in range(5)]
    for record in given:
        await spool.append(record).synced()
    assert records(await spool.seal()) == given


async def test_a_full_disk_keeps_nothing_from_being_loaded(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No segment can be begun: what is in the last one waits, the others do not."""
    await spool.append(b"x" * 1000).synced()
    await spool.append(b"last").synced()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        assert records(await spool.seal()) == [b"x" * 1000]
        await spool.append(b"more").synced()
    assert records(await spool.seal()) == [b"x" * 1000, b"last", b"more"]


async def test_what_the_dead_left_counts_from_the_start(spool: Spool, tmp_path: Path) -> None:
    other = Spool(tmp_path, "gateway-2")
    await other.open()
    await other.append(b"left").synced()
    await other.close()
    later = Spool(tmp_path, "gateway-3")
    await later.open()
    assert later.num_bytes > 0
    await later.close()


async def test_what_was_acknowledged_outlives_a_kill(spool: Spool, tmp_path: Path) -> None:
    """And only once its writer is dead is it taken over."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    told = [int(writer.stdout.readline()) for _ in range(50)]
    assert await spool.seal() == []
    writer.kill()
    told += [int(line) for line in writer.stdout.read().split()]
    writer.wait()
    writer.stdout.close()
    segments = await spool.seal()
    found = [int(record) for record in records(segments)]
    assert found == list(range(len(found))) and len(found) >= len(told)
    assert len(segments) > 1
    assert await spool.emptied() == []
    for segment in segments:
        await spool.remove(segment)
    assert await spool.emptied() == ["dying"]
    await spool.drop("dying")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["gateway-1"]


async def test_what_was_set_aside_stays_when_segments_are_numbered_anew(tmp_path: Path) -> None:
    for record in (b"first", b"second"):
        spool = Spool(tmp_path, "gateway-1")
        await spool.open()
        await spool.append(record).synced()
        for segment in await spool.seal():
            await spool.set_aside(segment, segment.read_bytes())
        assert spool.num_bytes == 0
        await spool.close()
    assert sorted(records(list(tmp_path.glob("*.set-aside")))) == [b"first", b"second"]


async def test_a_name_has_one_owner_and_its_leftovers_go_on(tmp_path: Path) -> None:
    first = Spool(tmp_path, "one")
    await first.open()
    second = Spool(tmp_path, "one")
    with pytest.raises(SpoolTaken):
        await second.open()
    first.append(b"left")
    await first.close()
    again = Spool(tmp_path, "one")
    await again.open()
    assert again.num_bytes > 0
    await again.append(b"new").synced()
    assert records(await again.seal()) == [b"left", b"new"]
    await again.close()
