"""When each key was last used: noted in memory when it passes a guard, written now and then."""

from __future__ import annotations

from datetime import UTC, datetime

from admin.database import EVERYTHING, Database
from admin.periodic import repeat
from admin.queries import sql

WRITE_INTERVAL_S = 60.0


class KeyUses:
    def __init__(self) -> None:
        self._used: dict[str, datetime] = {}

    def note(self, key_id: str) -> None:
        """Only for keys that exist, else anybody could fill the memory."""
        self._used[key_id] = datetime.now(UTC)

    async def run(self, database: Database) -> None:
        """Writes until cancelled."""
        what = "the use of keys is not written down"
        await repeat(what, lambda: self.write(database), WRITE_INTERVAL_S)

    async def write(self, database: Database) -> None:
        """What was noted since the last time; it is lost if this raises."""
        used, self._used = self._used, {}
        if used:
            async with database.transaction(EVERYTHING) as connection:
                await connection.execute(sql["keys_used"], list(used), list(used.values()))
