"""Remembers when each key was last used, and writes these times to the database at intervals."""

from __future__ import annotations

from datetime import UTC, datetime

from store.database import EVERYTHING, Database
from store.periodic import repeat
from store.queries import sql

WRITE_INTERVAL_S = 60.0


class KeyUses:
    def __init__(self) -> None:
        self._used: dict[str, datetime] = {}

    def note(self, key_id: str) -> None:
        """Records a use of a key, which must exist, because unknown ids could fill the memory."""
        self._used[key_id] = datetime.now(UTC)

    async def run(self, database: Database) -> None:
        """Writes uses at intervals until cancelled."""
        what = "the use of keys is not written down"
        await repeat(what, lambda: self.write(database), WRITE_INTERVAL_S)

    async def write(self, database: Database) -> None:
        """Writes the recorded uses to the database. If this fails, the uses are lost."""
        used, self._used = self._used, {}
        if used:
            async with database.transaction(EVERYTHING) as connection:
                await connection.execute(sql["keys_used"], list(used), list(used.values()))
