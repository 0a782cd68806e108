"""What an orchestrator asks of the admin plane where no data plane answers beside it."""

from __future__ import annotations

from litestar import Litestar, Response, get

from admin.database import Database
from admin.errors import AdminError
from admin.problems import to_response
from admin.queries import catalog_generation
from gateway.auth import public
from gateway.routes.health import get_version, livez


def make_probes(database: Database) -> Litestar:
    """/livez, /readyz, /health and /version. No key needed."""

    @get(["/readyz", "/health"], guards=[public])
    async def readyz() -> Response[dict[str, str]]:
        """The database answers."""
        try:
            async with database.acquire() as connection:
                await catalog_generation(connection)
        except AdminError:
            reason = "the database does not answer"
            return Response({"status": "unavailable", "reason": reason}, status_code=503)
        return Response({"status": "ok"})

    return Litestar(
        [livez, readyz, get_version],
        exception_handlers={Exception: to_response},
        openapi_config=None,
        logging_config=None,
    )
