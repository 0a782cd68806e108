"""Route of the overview of workers, models, tenants and problems."""

from __future__ import annotations

from litestar import get

from admin.http.guards import ADMIN, requires
from admin.http.request import AdminRequest
from admin.overview.overview import take_overview
from admin.overview.schemas import Overview


@get("/overview", guards=[requires(ADMIN)], tags=["overview"])
async def show_overview(request: AdminRequest) -> Overview:
    """Shows workers, base models, tenants, refusals and problems, with rates and percentiles of the
    last minute. Data of gateways is up to two seconds old."""
    async with request.reading() as connection:
        return await take_overview(connection)
