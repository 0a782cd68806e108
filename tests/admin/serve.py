"""An admin plane in a process of its own: python -m tests.admin.serve DSN STORE [SETTING=VALUE ...]

prints its URL. Settings: those of AdminConfig that are numbers, and min_free_bytes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from adapters.store.folder import LocalStore
from admin.app import create_app
from admin.http.plane import AdminConfig
from store.database import Database
from tests.serving import serving

PEPPER = b"pepper of the tests"


@asynccontextmanager
async def served(database: Database, store: Path, **settings: float) -> AsyncIterator[str]:
    """The URL of a plane with all it does beside its requests."""
    min_free_bytes = int(settings.pop("min_free_bytes", 0))
    app = create_app(
        AdminConfig(pepper=PEPPER, **settings),  # pyright: ignore[reportArgumentType]
        database=database,
        store=LocalStore(store, min_free_bytes=min_free_bytes),
    )
    upkeep = asyncio.create_task(app.state.admin.run())
    try:
        async with serving(app) as url:
            yield f"{url}/admin/v1"
    finally:
        upkeep.cancel()
        await asyncio.gather(upkeep, return_exceptions=True)


async def main() -> None:
    dsn, store, *pairs = sys.argv[1:]
    settings = {name: float(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    database = await Database.connect(dsn)
    async with served(database, Path(store), **settings) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
