"""Prices of base models.

A change applies to later requests. Earlier usage keeps its cost.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from store.database import Connection
from store.errors import NotFound
from store.queries import fetch_all, fetch_one, sql
from store.records import Price


class PriceDetails(Price, frozen=True, kw_only=True):
    updated_at: datetime


async def list_prices(connection: Connection, after: str, limit: int) -> list[PriceDetails]:
    """Returns up to `limit` prices by model, beginning after the model `after`."""
    return await fetch_all(connection, PriceDetails, "price_list", after, limit)


async def find_price(connection: Connection, model: str) -> PriceDetails:
    """Returns the price of a model. Raises NotFound."""
    missing = NotFound(f"no price of {model[:128]!r}", "price_not_found", "model")
    return await fetch_one(connection, PriceDetails, "price_find", model, missing=missing)


async def set_price(connection: Connection, price: Price) -> None:
    """Sets the price of an existing model. Must be called in a transaction."""
    await connection.execute(sql["price_put"], *msgspec.structs.astuple(price))


async def remove_price(connection: Connection, model: str) -> None:
    """Removes a model's price. Future requests to the model are free."""
    await connection.execute(sql["price_delete"], model)
