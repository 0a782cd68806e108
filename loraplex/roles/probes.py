"""Probes of the admin plane, and of any plane that is waiting for its database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from litestar import Litestar, Response, get

from admin.http.problems import to_response
from gateway.http.routes.health import get_version, livez
from store.database import Database
from store.errors import ApiError
from store.queries import catalog_generation
from web.guards import public

FRESH_S = 1.0
"""Seconds for which the result of a database check is reused. Checks are limited in this way,
because probes have no rate limit."""


class Readiness:
    """State of the database, checked at most once per `FRESH_S` seconds."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = asyncio.Lock()
        self._asked_at = -FRESH_S
        """Time of the last check, as of time.monotonic()."""
        self._is_ready = False

    async def check(self) -> bool:
        async with self._lock:
            if time.monotonic() - self._asked_at >= FRESH_S:
                self._is_ready = await self._ask()
                self._asked_at = time.monotonic()
            return self._is_ready

    async def _ask(self) -> bool:
        try:
            async with self._database.acquire() as connection:
                await catalog_generation(connection)
        except ApiError:
            return False
        return True


def make_probes(
    is_ready: Callable[[], Awaitable[bool]], on_error: Any = to_response, **options: Any
) -> Litestar:
    """Returns an application with /livez, /readyz, /health and /version, which need no key."""

    @get(["/readyz", "/health"], guards=[public])
    async def readyz() -> Response[dict[str, str]]:
        if await is_ready():
            return Response({"status": "ok"})
        reason = "the database does not answer"
        return Response({"status": "unavailable", "reason": reason}, status_code=503)

    return Litestar(
        [livez, readyz, get_version],
        exception_handlers={Exception: on_error},
        openapi_config=None,
        logging_config=None,
        **options,
    )
