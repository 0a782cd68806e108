"""All that a database holds, to see whether anything changed or lies there that must not."""

from __future__ import annotations

from store.database import EVERYTHING, Database


async def dump(database: Database, *, but: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Table to its rows as text, bytes as hexadecimal digits; what the planes may read, but for
    these tables."""
    async with database.transaction(EVERYTHING) as connection:
        tables = await connection.fetch(
            "SELECT c.oid::regclass::text AS name FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE relkind IN ('r', 'p') AND nspname = 'public'"
            " AND has_table_privilege(c.oid, 'SELECT')"
        )
        assert len(tables) > 15
        found: dict[str, list[str]] = {}
        for name in sorted(row["name"] for row in tables):
            if name not in but:
                rows = await connection.fetch(f"SELECT t::text AS text FROM {name} t")
                found[name] = sorted(row["text"] for row in rows)
    return found
