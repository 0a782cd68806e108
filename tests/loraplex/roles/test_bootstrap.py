"""What is made at the first start, be it of several processes at once."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from loraplex.errors import AdminKeyExists
from loraplex.roles.bootstrap import load_pepper, make_first_admin_key
from loraplex.settings import Settings
from store.database import EVERYTHING, Database
from store.records import parse_key

NUM_PROCESSES = 2
NUM_FOLDERS = 20


def test_processes_that_start_at_once_have_one_pepper(tmp_path: Path) -> None:
    """A key that one makes works at the other."""
    folders = [tmp_path / str(number) for number in range(NUM_FOLDERS)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=context) as processes:
        for folder in folders:
            folder.mkdir()
            settings = Settings(data_dir=folder)
            started = [processes.submit(load_pepper, settings) for _ in range(NUM_PROCESSES)]
            peppers = {each.result() for each in started}
            assert peppers == {(folder / "pepper").read_bytes()}
            assert [path.name for path in folder.iterdir()] == ["pepper"]
            assert (folder / "pepper").stat().st_mode & 0o777 == 0o600


async def test_there_is_one_first_admin_key(dsn: str) -> None:
    """The next is made only where the first is no longer valid."""
    first = parse_key(await make_first_admin_key(dsn, b"pepper"))
    with pytest.raises(AdminKeyExists):
        await make_first_admin_key(dsn, b"pepper")
    database = await Database.connect(dsn, sees=EVERYTHING)
    async with database.transaction() as connection:
        assert first is not None
        await connection.execute("UPDATE api_keys SET revoked_at = now() WHERE id = $1", first)
    await database.close()
    assert parse_key(await make_first_admin_key(dsn, b"pepper")) not in (None, first)
