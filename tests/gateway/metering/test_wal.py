"""Records on the disk: before anybody is told, and after whoever wrote them has died."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.metering.wal import RETRY_S, WriteAheadLog
from gateway.metering.wal_files import WalTaken, read_frames

WRITER = """
import asyncio, sys
from pathlib import Path
from gateway.metering.wal import WriteAheadLog
async def main():
    wal = WriteAheadLog(Path(sys.argv[1]), "dying", segment_bytes=200)
    await wal.open()
    for i in range(100_000):
        await wal.append(b"%d" % i).synced()
        print(i, flush=True)
asyncio.run(main())
"""


@pytest.fixture
async def wal(tmp_path: Path) -> AsyncIterator[WriteAheadLog]:
    wal = WriteAheadLog(tmp_path, "gateway-1", segment_bytes=1000)
    await wal.open()
    yield wal
    await wal.close()


def records(segments: list[Path]) -> list[bytes]:
    return [record for path in segments for record in read_frames(path.read_bytes())[0]]


async def test_all_come_out_in_order_and_are_gone_when_loaded(wal: WriteAheadLog) -> None:
    given = [b"record %d" % i for i in range(500)]
    await asyncio.gather(*(wal.append(record).synced() for record in given))
    segments = await wal.on_thread(wal.files.seal)
    assert records(segments) == given
    assert wal.num_bytes == sum(path.stat().st_size for path in segments)
    await wal.append(b"later").synced()
    assert len(records(segments)) == 500
    for segment in segments:
        await wal.on_thread(wal.files.remove, segment)
    assert records(await wal.on_thread(wal.files.seal)) == [b"later"]


async def test_those_that_wait_share_a_sync(
    wal: WriteAheadLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs: list[int] = []

    may_sync = threading.Event()

    def slow(file: int) -> None:
        syncs.append(file)
        assert may_sync.wait(60)

    monkeypatch.setattr(os, "fdatasync", slow)
    batches = [wal.append(b"x") for _ in range(200)]
    may_sync.set()
    await asyncio.gather(*(batch.synced() for batch in batches))
    assert len(syncs) <= 3
    assert len(records(await wal.on_thread(wal.files.seal))) == 200


async def test_a_disk_that_fails_is_told_and_tried_again(
    wal: WriteAheadLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record counts once more when the disk takes it, and nothing that was there is lost."""
    await wal.append(b"before").synced()
    tried_at: list[float] = []
    may_fail = threading.Event()

    def full(*_: object) -> int:
        tried_at.append(time.monotonic())
        assert may_fail.wait(60)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", full)
        amid = wal.append(b"amid")
        while not tried_at:
            await asyncio.sleep(0)
        after = wal.append(b"after")
        may_fail.set()
        with pytest.raises(OSError, match="No space"):
            await amid.synced()
        assert wal.failure is not None
        await asyncio.sleep(RETRY_S / 2)
        assert len(tried_at) == 1 or tried_at[1] - tried_at[0] >= RETRY_S
    async with asyncio.timeout(20):
        await after.synced()
    assert wal.failure is None
    assert records(await wal.on_thread(wal.files.seal)) == [b"before", b"amid", b"after"]


async def test_a_write_that_fails_in_another_way_keeps_nobody_waiting(
    wal: WriteAheadLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: bytes) -> None:
        raise ValueError("a bug")

    with monkeypatch.context() as failing:
        failing.setattr(wal.files, "write", broken)
        with pytest.raises(OSError, match="a bug"):
            async with asyncio.timeout(20):
                await wal.append(b"first").synced()
    async with asyncio.timeout(20):
        await wal.append(b"second").synced()
    assert records(await wal.on_thread(wal.files.seal)) == [b"first", b"second"]


async def test_a_log_without_records_knows_whether_its_disk_takes_any(
    wal: WriteAheadLog, tmp_path: Path
) -> None:
    """Its folder is gone, as after a volume was unmounted, and comes back."""
    await wal.check()
    assert wal.failure is None
    (tmp_path / "gateway-1").rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="No such file"):
        await wal.check()
    assert wal.failure is not None
    (tmp_path / "elsewhere").rename(tmp_path / "gateway-1")
    await wal.check()
    assert wal.failure is None
    await wal.append(b"record").synced()
    assert records(await wal.on_thread(wal.files.seal)) == [b"record"]


async def test_a_disk_that_takes_little_at_a_time_gets_all(
    wal: WriteAheadLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:7], at))
    given = [b"record %d" % i for i in range(5)]
    for record in given:
        await wal.append(record).synced()
    assert records(await wal.on_thread(wal.files.seal)) == given


async def test_a_full_disk_keeps_nothing_from_being_loaded(
    wal: WriteAheadLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No segment can be begun: what is in the last one waits, the others do not."""
    await wal.append(b"x" * 1000).synced()
    await wal.append(b"last").synced()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        assert records(await wal.on_thread(wal.files.seal)) == [b"x" * 1000]
        await wal.append(b"more").synced()
    assert records(await wal.on_thread(wal.files.seal)) == [b"x" * 1000, b"last", b"more"]


async def test_what_the_dead_left_counts_from_the_start(wal: WriteAheadLog, tmp_path: Path) -> None:
    other = WriteAheadLog(tmp_path, "gateway-2")
    await other.open()
    await other.append(b"left").synced()
    await other.close()
    later = WriteAheadLog(tmp_path, "gateway-3")
    await later.open()
    assert later.num_bytes > 0
    await later.close()


async def test_what_was_acknowledged_outlives_a_kill(wal: WriteAheadLog, tmp_path: Path) -> None:
    """And only once its writer is dead is it taken over."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    told = [int(writer.stdout.readline()) for _ in range(50)]
    assert await wal.on_thread(wal.files.seal) == []
    writer.kill()
    told += [int(line) for line in writer.stdout.read().split()]
    writer.wait()
    writer.stdout.close()
    segments = await wal.on_thread(wal.files.seal)
    found = [int(record) for record in records(segments)]
    assert found == list(range(len(found))) and len(found) >= len(told)
    assert len(segments) > 1
    assert await wal.on_thread(wal.files.emptied) == []
    for segment in segments:
        await wal.on_thread(wal.files.remove, segment)
    assert await wal.on_thread(wal.files.emptied) == ["dying"]
    await wal.on_thread(wal.files.drop, "dying")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["gateway-1"]


async def test_what_was_set_aside_stays_when_segments_are_numbered_anew(tmp_path: Path) -> None:
    for record in (b"first", b"second"):
        wal = WriteAheadLog(tmp_path, "gateway-1")
        await wal.open()
        await wal.append(record).synced()
        for segment in await wal.on_thread(wal.files.seal):
            await wal.on_thread(wal.files.set_aside, segment, segment.read_bytes())
        assert wal.num_bytes == 0
        await wal.close()
    assert sorted(records(list(tmp_path.glob("*.set-aside")))) == [b"first", b"second"]


async def test_a_name_has_one_owner_and_its_leftovers_go_on(tmp_path: Path) -> None:
    first = WriteAheadLog(tmp_path, "one")
    await first.open()
    second = WriteAheadLog(tmp_path, "one")
    with pytest.raises(WalTaken):
        await second.open()
    first.append(b"left")
    await first.close()
    again = WriteAheadLog(tmp_path, "one")
    await again.open()
    assert again.num_bytes > 0
    await again.append(b"new").synced()
    assert records(await again.on_thread(again.files.seal)) == [b"left", b"new"]
    await again.close()
