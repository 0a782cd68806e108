"""What is made at the first start, be it of several processes at once."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from loraplex.roles.bootstrap import load_pepper
from loraplex.settings import Settings

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
