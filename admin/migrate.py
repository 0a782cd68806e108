"""Migrates a database to the schema of the files in migrations/. Each file is applied once and in
order.

A file is named `NNNN_pre_what.sql` if it is safe to apply while the old code runs, or
`NNNN_post_what.sql` if it must be applied after the roll-out. The post files of a version come
after its pre files, and are safe to apply together with the pre files of a later version. The first
file is the baseline: the whole schema of release 0.1.0. There are no downgrades. Migration fails if
a file was changed or removed after it was applied, or if an earlier version created the database
with another first file.

Each file is applied in one transaction, unless its first line is `-- no transaction`. The
statements of such a file, separated by lines with `--`, are applied one by one, so that they can be
CREATE INDEX CONCURRENTLY or batches of a backfill. A run that was killed begins the file again, so
each statement must do nothing if it is done. A statement that begins with the line `-- repeat` is
repeated until it affects no row.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

import migrations
from store.database import Connection, Database
from store.errors import MigrationError

LOCK_ID = 0x6C6F7261
"""Key of the advisory lock that a migration holds. Its bytes spell "lora"."""

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
    def statements(self) -> list[str] | None:
        """Statements to apply one by one, or None if the file is applied in one transaction."""
        head, _, rest = self.text.partition("\n")
        return rest.split("\n--\n") if head == "-- no transaction" else None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def load_migrations(folder: Path | None = None) -> list[Migration]:
    """Returns the migrations in `folder` (default: the package `migrations`) by number.

    Raises MigrationError for an invalid name, and for a number that is missing or used twice.
    """
    folder = folder or Path(migrations.__path__[0])
    found = [_load(file) for file in sorted(folder.glob("*.sql"))]
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
    """Raises MigrationError unless all migrations that must precede this version's roll-out are
    applied. Accepts a newer schema, because the next version's pre files are safe for this
    version."""
    files = load_migrations() if files is None else files
    async with database.acquire() as connection:
        applied: set[str] = set()
        if await connection.fetchval("SELECT to_regclass('schema_migrations')") is not None:
            rows = await connection.fetch("SELECT name FROM schema_migrations")
            applied = {row["name"] for row in rows}
    _check_baseline(applied, files)
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
    """Applies missing migrations and returns their names. Calls `report(name)` before each one.

    `with_post` also applies migrations that must wait until the previous version no longer runs.
    Concurrent calls wait for each other, and then find nothing to do. Raises MigrationError.
    """
    files = load_migrations() if files is None else files
    applied: list[str] = []
    async with database.acquire() as connection:
        await connection.execute(_WITHOUT_LIMIT)
        # PostgreSQL releases the lock when the session ends, even if this process is killed.
        await connection.execute("SELECT pg_advisory_lock($1)", LOCK_ID)
        try:
            # Without this check, a role that may not create tables would fail even if no migration
            # is missing.
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
    """Returns the number of files to apply before a roll-out: all except the post files at the end
    of the list."""
    return max((place for place, file in enumerate(files, 1) if not file.is_post), default=0)


async def _check_encoding(connection: Connection) -> None:
    """Raises MigrationError unless the database's encoding is UTF8. Under the locale C,
    PostgreSQL's default is another encoding."""
    encoding = await connection.fetchval("SHOW server_encoding")
    if encoding != "UTF8":
        raise MigrationError(
            f"the database must be UTF8, not {encoding}: CREATE DATABASE ... ENCODING 'UTF8'"
            " TEMPLATE template0"
        )


def _check_baseline(applied: Collection[str], files: list[Migration]) -> None:
    """Raises MigrationError if a version before the first release created the database."""
    if files and any(name[:4] == "0001" and name != files[0].name for name in applied):
        raise MigrationError(
            "the database was created by a version before 0.1.0 and cannot be upgraded: use an"
            " empty database and another data directory, and push the adapters again"
        )


async def _missing(connection: Connection, files: list[Migration]) -> list[Migration]:
    rows = await connection.fetch("SELECT number, name, sha256 FROM schema_migrations")
    _check_baseline([row["name"] for row in rows], files)
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
    if migration.statements is not None:
        # Waits for locks without a limit: a CREATE INDEX CONCURRENTLY that gives up leaves an
        # invalid index, and blocks no writer while it waits.
        for statement in migration.statements:
            await _apply_alone(connection, statement)
    async with connection.transaction():
        await connection.execute("SET LOCAL lock_timeout = '10s'")
        if migration.statements is None:
            await connection.execute(migration.text)
        await connection.execute(
            "INSERT INTO schema_migrations (number, name, sha256) VALUES ($1, $2, $3)",
            migration.number,
            migration.name,
            migration.sha256,
        )


async def _apply_alone(connection: Connection, statement: str) -> None:
    """Applies a statement in a transaction of its own, and again while it affects rows if it begins
    with `-- repeat`."""
    repeats = statement.lstrip().startswith("-- repeat\n")
    while True:
        status = await connection.execute(statement)
        if not repeats or status.split()[-1] == "0":
            return
