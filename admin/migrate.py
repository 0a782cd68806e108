"""Brings a database to the schema of the files in migrations/: in order, each once.

A file is `NNNN_pre_what.sql` (safe while the old code runs) or `NNNN_post_what.sql` (to run after
the roll-out), and one transaction. A version's post files are its last; those that a later
version's pre files follow are safe with it. Forward only: a file that was changed after it was
applied, or that vanished, is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

import migrations
from admin.database import Connection, Database
from admin.errors import MigrationError

LOCK_ID = 0x6C6F7261
"""Key of the advisory lock: the letters "lora"."""

SCHEMA = "schema.sql"
"""Beside the files: the schema that all of them make, for reading."""

_FILE_NAME = re.compile(r"(\d{4})_(pre|post)_[a-z0-9_]+\.sql")
_WITHOUT_LIMIT = (
    "SELECT set_config('statement_timeout', '0', false), set_config('lock_timeout', '0', false)"
)
_CREATE_TABLE = """
CREATE TABLE schema_migrations (
    number     integer PRIMARY KEY,
    name       text NOT NULL,
    sha256     text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
)"""


class Migration(msgspec.Struct, frozen=True):
    number: int
    name: str
    text: str

    @property
    def is_post(self) -> bool:
        return "_post_" in self.name

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def load_migrations(folder: Path | None = None) -> list[Migration]:
    """The files of `folder` (default: the package migrations) in order.

    Raises MigrationError for a name of another form and for a number used twice or left out.
    """
    folder = folder or Path(migrations.__path__[0])
    found = [_load(file) for file in sorted(folder.glob("*.sql")) if file.name != SCHEMA]
    for expected, migration in enumerate(found, start=1):
        if migration.number != expected:
            raise MigrationError(f"{migration.name}: expected number {expected:04}")
    return found


def _load(file: Path) -> Migration:
    matched = _FILE_NAME.fullmatch(file.name)
    if matched is None:
        raise MigrationError(f"{file.name}: not NNNN_pre_what.sql or NNNN_post_what.sql")
    return Migration(int(matched[1]), file.name, file.read_text())


async def check_schema(database: Database, files: list[Migration] | None = None) -> None:
    """Raises MigrationError unless every file that a roll-out needs has been applied. A database
    that is newer will do: its changes are made for the version before too."""
    files = load_migrations() if files is None else files
    async with database.acquire() as connection:
        applied: set[str] = set()
        if await connection.fetchval("SELECT to_regclass('schema_migrations')") is not None:
            rows = await connection.fetch("SELECT name FROM schema_migrations")
            applied = {row["name"] for row in rows}
    for migration in files[: _num_before_roll_out(files)]:
        if migration.name not in applied:
            raise MigrationError(f"the database lacks {migration.name}: run `loraplex migrate`")


async def migrate(
    database: Database,
    files: list[Migration] | None = None,
    report: Callable[[str], None] = lambda name: None,
    *,
    with_post: bool = False,
) -> list[str]:
    """Applies what is missing and returns the names of it; `report` hears each before it runs.

    with_post: also what must wait until nothing of the version before runs. Others that migrate at
    the same time wait and then find nothing to do. Raises MigrationError.
    """
    files = load_migrations() if files is None else files
    applied: list[str] = []
    async with database.acquire() as connection:
        await connection.execute(_WITHOUT_LIMIT)
        # The lock belongs to the session: it is freed by itself if this process dies.
        await connection.execute("SELECT pg_advisory_lock($1)", LOCK_ID)
        try:
            # A role that may create nothing can still find that there is nothing to do.
            if await connection.fetchval("SELECT to_regclass('schema_migrations')") is None:
                await _check_encoding(connection)
                await connection.execute(_CREATE_TABLE)
            due = files if with_post else files[: _num_before_roll_out(files)]
            for migration in await _missing(connection, files):
                if migration not in due:
                    break
                report(migration.name)
                await _apply(connection, migration)
                applied.append(migration.name)
        finally:
            await connection.execute("SELECT pg_advisory_unlock($1)", LOCK_ID)
    return applied


def _num_before_roll_out(files: list[Migration]) -> int:
    """How many of the files come first: all but the post files at the end."""
    return max((place for place, file in enumerate(files, 1) if not file.is_post), default=0)


async def _check_encoding(connection: Connection) -> None:
    """A cluster made under the locale C has another by default. Raises MigrationError."""
    encoding = await connection.fetchval("SHOW server_encoding")
    if encoding != "UTF8":
        raise MigrationError(
            f"the database must be UTF8, not {encoding}: CREATE DATABASE ... ENCODING 'UTF8'"
            " TEMPLATE template0"
        )


async def _missing(connection: Connection, files: list[Migration]) -> list[Migration]:
    rows = await connection.fetch("SELECT number, name, sha256 FROM schema_migrations")
    known = {migration.number: migration for migration in files}
    for row in rows:
        migration = known.pop(row["number"], None)
        if migration is None:
            raise MigrationError(
                f"the database has {row['name']}, which this version does not know: it is newer"
            )
        if migration.sha256 != row["sha256"]:
            raise MigrationError(f"{migration.name} was changed after it was applied")
    return sorted(known.values(), key=lambda migration: migration.number)


async def _apply(connection: Connection, migration: Migration) -> None:
    async with connection.transaction():
        await connection.execute("SET LOCAL lock_timeout = '10s'")
        await connection.execute(migration.text)
        await connection.execute(
            "INSERT INTO schema_migrations (number, name, sha256) VALUES ($1, $2, $3)",
            migration.number,
            migration.name,
            migration.sha256,
        )
