"""Probes of the admin plane, and of any plane that is waiting for its database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from litestar import Litestar, Response, get

from admin.http.problems import to_response
from store.database import READ_ONLY, Database
from store.errors import ApiError
from web.guards import public
from web.version import this_version

UNAVAILABLE = "the database does not answer"
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
        self._reason: str | None = None

    async def check(self) -> str | None:
        """Returns why the admin plane is not ready, or None if it is."""
        async with self._lock:
            if time.monotonic() - self._asked_at >= FRESH_S:
                self._reason = await self._ask()
                self._asked_at = time.monotonic()
            return self._reason

    async def _ask(self) -> str | None:
        try:
            await self._database.check_writable()
        except ApiError as error:
            # Other messages may name hosts or accounts, and probes need no key.
            return READ_ONLY if error.message == READ_ONLY else UNAVAILABLE
        return None


def make_probes(
    why_not_ready: Callable[[], Awaitable[str | None]], on_error: Any = to_response, **options: Any
) -> Litestar:
    """Returns an application with /livez, /readyz, /health and /version, which need no key."""

    @get("/livez", guards=[public])
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @get("/version", guards=[public])
    async def get_version() -> dict[str, str]:
        return {"version": this_version()}

    @get(["/readyz", "/health"], guards=[public])
    async def readyz() -> Response[dict[str, str]]:
        reason = await why_not_ready()
        if reason is None:
            return Response({"status": "ok"})
        return Response({"status": "unavailable", "reason": reason}, status_code=503)

    return Litestar(
        [livez, readyz, get_version],
        exception_handlers={Exception: on_error},
        openapi_config=None,
        logging_config=None,
        **options,
    )
