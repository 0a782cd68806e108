"""Named queries of the `.sql` files in store/ and admin/, and the catalog that gateways load.

A file consists of blocks, each a line `-- name: <name>` and the statement after it. Names are
unique. `{columns of MODULE.STRUCT}` stands for the columns of a struct's fields, except columns
that the statement itself names with AS. `{t.columns of MODULE.STRUCT}` takes the columns from the
table `t`. `{values of MODULE.STRUCT}` stands for the values of a struct's fields, which are the
statement's last parameters: pass them as `*msgspec.structs.astuple(record)`. `{updates of
MODULE.STRUCT}` stands for the assignments with which ON CONFLICT updates the columns.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from store.database import Connection, Row
from store.errors import ApiError
from store.records import (
    AdapterProof,
    Alias,
    ApiKey,
    BaseModel,
    CatalogSnapshot,
    Changed,
    KnownWorker,
    Price,
    Quota,
    ServedVersion,
    Tenant,
)

CATALOG_CHANNEL = "loraplex_catalog"
"""Channel of NOTIFY for catalog changes. The payload is the new generation."""

ROWS_AT_ONCE = 500
"""Catalog rows that are converted at a time. Other tasks of the gateway run between batches."""

T = TypeVar("T")

_HEADER = re.compile(r"^-- name: (\w+)[ \t]*$", re.MULTILINE)
_FIELDS = re.compile(r"\{(\w+\.)?(columns|values|updates) of ([\w.]+)\.(\w+)\}")
_NAMED = re.compile(r"\bAS (\w+)")
_PARAMETER = re.compile(r"\$(\d+)")


class Queries(dict[str, str]):
    """SQL text by name. Columns are filled in when a statement is first used, because the modules
    that define the structs import this module."""

    def __getitem__(self, name: str) -> str:
        text = super().__getitem__(name)
        if _FIELDS.search(text):
            self[name] = text = _FIELDS.sub(partial(_expand, text), text)
        return text


def _expand(text: str, found: re.Match[str]) -> str:
    """Returns the SQL that replaces a placeholder of the statement `text`."""
    table, what, module, struct = found.groups("")
    fields = msgspec.structs.fields(getattr(import_module(module), struct))
    names = [field.encode_name for field in fields]
    if what == "values":
        first = max(map(int, _PARAMETER.findall(text)), default=0) + 1
        return ", ".join(f"${number}" for number, _ in enumerate(names, first))
    if what == "updates":
        updated = [name for name in names if f"ON CONFLICT ({name})" not in text]
        return ", ".join(f"{name} = excluded.{name}" for name in updated)
    named = _NAMED.findall(text)
    return ", ".join(table + name for name in names if name not in named)


def load_queries(*folders: Path) -> Queries:
    """Returns the folders' SQL statements by name. Raises ValueError for a name used twice."""
    queries = Queries()
    for file in sorted(file for folder in folders for file in folder.rglob("*.sql")):
        parts = _HEADER.split(file.read_text())
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            if name in queries:
                raise ValueError(f"{file.name}: the query {name} is defined twice")
            queries[name] = text.strip()
    return queries


_HERE = Path(__file__).parent
sql = load_queries(_HERE, _HERE.parent / "admin")


def from_row(kind: type[T], row: Row) -> T:
    """Converts a row to a record whose fields have the names of the row's columns."""
    return msgspec.convert(dict(row), kind, strict=False)


async def lock_catalog(connection: Connection) -> None:
    """Prevents other transactions from changing the catalog until the current one ends."""
    await connection.fetchval(sql["catalog_lock"])


async def fetch_all(connection: Connection, kind: type[T], query: str, *args: Any) -> list[T]:
    """Returns the rows of a named query as records."""
    return [from_row(kind, row) for row in await connection.fetch(sql[query], *args)]


async def fetch_one(
    connection: Connection,
    kind: type[T],
    query: str,
    *args: Any,
    missing: ApiError | None = None,
) -> T:
    """Returns the row of a named query as a record. Raises `missing` if there is none; without
    `missing`, the row must exist."""
    row = await connection.fetchrow(sql[query], *args)
    if row is None and missing is not None:
        raise missing
    assert row is not None
    return from_row(kind, row)


async def load_catalog(connection: Connection, since: int | None = None) -> CatalogSnapshot:
    """Returns the catalog as of one instant. If `since` is given, includes only the tenants and
    adapters that have changed since that generation."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        generation: int = await connection.fetchval(sql["catalog_generation"])
        await connection.execute(sql["plan_each"])
        changed = tenants = None
        adapters: tuple[list[str] | None, list[str] | None] = None, None
        if since is not None:
            rows = await connection.fetch(sql["catalog_changed"], since)
            changed = Changed(
                frozenset(row["tenant_id"] for row in rows if not row["name"]),
                frozenset((row["tenant_id"], row["name"]) for row in rows if row["name"]),
            )
            tenants = list(changed.tenants)
            owners = [tenant_id for tenant_id, _ in changed.adapters]
            adapters = owners, [name for _, name in changed.adapters]

        async def all_of(kind: type[Any], query: str, *args: Any) -> tuple[Any, ...]:
            rows = await connection.fetch(sql[query], *args)
            records: list[Any] = []
            for i in range(0, len(rows), ROWS_AT_ONCE):
                part = [dict(row) for row in rows[i : i + ROWS_AT_ONCE]]
                records += msgspec.convert(part, list[kind], strict=False)
                await asyncio.sleep(0)
            return tuple(records)

        return CatalogSnapshot(
            generation=generation,
            tenants=await all_of(Tenant, "catalog_tenants", tenants),
            keys=await all_of(ApiKey, "catalog_keys", tenants),
            models=await all_of(BaseModel, "catalog_models"),
            versions=await all_of(ServedVersion, "catalog_versions", *adapters),
            aliases=await all_of(Alias, "catalog_aliases", *adapters),
            proofs=await all_of(AdapterProof, "catalog_proofs", *adapters),
            approved_templates=frozenset(
                row["digest"] for row in await connection.fetch(sql["catalog_approved_templates"])
            ),
            quotas=await all_of(Quota, "catalog_quotas", tenants),
            prices=await all_of(Price, "catalog_prices"),
            workers=await all_of(KnownWorker, "catalog_workers"),
            changed=changed,
        )


async def catalog_generation(connection: Connection) -> int:
    """Returns the catalog's generation, which grows with each change that gateways must see. This
    query is cheap enough to poll."""
    return await connection.fetchval(sql["catalog_generation"])
