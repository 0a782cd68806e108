"""Steps that routes of entities have in common: find the tenant, read a page, check If-Match."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from admin.http.guards import tenant_for
from admin.http.request import AdminRequest
from admin.schemas import Page
from store.database import Connection
from store.records import Tenant

R = TypeVar("R")
V = TypeVar("V")


@asynccontextmanager
async def reading_of(
    request: AdminRequest, tenant: str | None
) -> AsyncGenerator[tuple[Connection, Tenant]]:
    """Opens a read-only transaction. Yields the connection, and the tenant that the caller names.
    Raises the errors of `tenant_for`."""
    async with request.reading() as connection:
        yield connection, await tenant_for(connection, request.user, tenant)


@asynccontextmanager
async def changing_of(
    request: AdminRequest, tenant: str | None
) -> AsyncGenerator[tuple[Connection, Tenant]]:
    """Opens a transaction for a change. Yields the connection, and the tenant that the caller
    names. Raises the errors of `tenant_for`."""
    async with request.transaction() as connection:
        yield connection, await tenant_for(connection, request.user, tenant)


async def read_page(
    request: AdminRequest,
    limit: int,
    view: Callable[[R], V],
    read: Callable[..., Awaitable[list[R]]],
    *args: Any,
) -> Page[V]:
    """Returns a page of the records that the query `read` returns, each converted by `view`."""
    async with request.reading() as connection:
        found = await read(connection, *args, limit + 1)
    return page([view(record) for record in found], limit)


def page(found: list[V], limit: int) -> Page[V]:
    """Returns a page of at most `limit` items. `found` has one more if another page follows."""
    return Page(data=found[:limit], has_more=len(found) > limit)
