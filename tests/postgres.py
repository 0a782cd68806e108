"""A real PostgreSQL for tests: one server a process, a migrated template, a database a test.

from tests.postgres import fresh_database
with fresh_database() as dsn: ...

Whoever stops or changes the server itself takes `own_server`.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from loraplex.box.postgres import EmbeddedPostgres, find_binaries
from loraplex.roles.bootstrap import migrate_database

_numbers = itertools.count()
# Tests may lose data when the machine stops, so nothing waits for the disk.
SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_wal_size": "64MB",
}
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 2 << 30


@contextmanager
def own_server(
    settings: Mapping[str, str] | None = None, parent: Path | None = None
) -> Iterator[EmbeddedPostgres]:
    """An empty one; it stops and is removed afterwards."""
    with temporary_home(parent) as home:
        postgres = EmbeddedPostgres(home / "data", root_home=home, settings=settings)
        initialise(postgres, home / "data")
        with postgres:
            yield postgres


def schema_of(dsn: str) -> str:
    """Returns the schema as pg_dump writes it, without the partitions that are made each day."""
    command = [str(find_binaries() / "bin/pg_dump"), "--schema-only"]
    command += ["--exclude-table=usage_[0-9]*", dsn]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # A random word of each dump.
    return "\n".join(line for line in text.splitlines() if "restrict " not in line)


@contextmanager
def temporary_home(parent: Path | None = None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lpx-", dir=parent) as folder:
        home = Path(folder)
        home.chmod(0o711)  # the server's account passes
        yield home


def initialise(postgres: EmbeddedPostgres, data_dir: Path) -> None:
    """Gives it a copy of a new cluster: that takes a tenth of the time of initdb. data_dir: the one
    that it was made for."""
    postgres.home.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", f"{_new_cluster()}/.", str(postgres.home)], check=True)
    if postgres.account:
        # As it is left by a first start.
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (data_dir / "pg").symlink_to(postgres.home)


@cache
def _new_cluster() -> Path:
    """Returns the home of a server that was started once; it is removed at exit."""
    stack = ExitStack()
    atexit.register(stack.close)
    home = stack.enter_context(temporary_home())
    with EmbeddedPostgres(home / "data", root_home=home) as postgres:
        return postgres.home


@cache
def server() -> EmbeddedPostgres:
    """The server of this test process; it stops and is removed at exit."""
    stack = ExitStack()
    postgres = stack.enter_context(own_server(SETTINGS, _memory()))
    atexit.register(stack.close)
    _run(_execute(postgres.dsn(), "CREATE DATABASE template_loraplex"))
    _run(migrate_database(postgres.dsn("template_loraplex"), with_post=True))
    return postgres


def _memory() -> Path | None:
    """Where files lie in memory, if there is enough of it: a database a test is hundreds of files
    made and deleted, and ext4 without a journal looks at each that was deleted within a minute."""
    if not MEMORY.is_dir() or os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        return None
    return MEMORY if shutil.disk_usage(MEMORY).free > MEMORY_BYTES else None


@contextmanager
def fresh_database(*, migrated: bool = True, copied: str | None = None) -> Iterator[str]:
    """The DSN of a database of its own, dropped afterwards. It is a copy of the one whose DSN is
    `copied` and that nobody is connected to, or empty but for the schema if `migrated` is set."""
    postgres = server()
    name = f"test_{os.getpid()}_{next(_numbers)}"
    template = "template_loraplex" if migrated else "template0"
    if copied is not None:
        template = urlsplit(copied).path.removeprefix("/")
    _run(_execute(postgres.dsn(), f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy"))
    try:
        yield postgres.dsn(name)
    finally:
        _run(_execute(postgres.dsn(), f"DROP DATABASE {name} WITH (FORCE)"))


async def _execute(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _run(coroutine: Coroutine[None, None, object]) -> None:
    """On a loop of its own, so that it can be called where one runs already."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, coroutine).result()
