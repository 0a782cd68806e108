"""Prices of base models: functions of a connection to records.

A change counts for requests that come after it; what was used before keeps its cost.
"""

from __future__ import annotations

from datetime import datetime

from admin.database import Connection
from admin.errors import NotFound
from admin.queries import fetch_all, fetch_one, sql
from admin.records import Price


class PriceDetails(Price, frozen=True, kw_only=True):
    updated_at: datetime


async def list_prices(connection: Connection, after: str, limit: int) -> list[PriceDetails]:
    """By model; those that have one."""
    return await fetch_all(connection, PriceDetails, "price_list", after, limit)


async def find_price(connection: Connection, model: str) -> PriceDetails:
    """Raises NotFound."""
    missing = NotFound(f"no price of {model[:128]!r}", "price_not_found", "model")
    return await fetch_one(connection, PriceDetails, "price_find", model, missing=missing)


async def set_price(connection: Connection, price: Price) -> None:
    """Sets the price of a model that is there, in a transaction of the caller's."""
    await connection.execute(
        sql["price_put"], price.model, price.input, price.cached_input, price.output
    )


async def remove_price(connection: Connection, model: str) -> None:
    """From then on it costs nothing."""
    await connection.execute(sql["price_delete"], model)
