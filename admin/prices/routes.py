"""Routes of the prices of base models and their adapters: list, show, set, remove."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar

import msgspec

from admin.http.entities import Entity
from admin.models import models
from admin.prices import prices
from admin.prices.prices import PriceDetails
from admin.schemas import Deleted, shown
from store.database import Connection
from store.errors import Invalid
from store.money import MICRO, count_dollars, in_dollars
from store.records import Price

MAX_DOLLARS = 1_000_000
PARTS = ("input", "cached_input", "output")
"""Names of the fields that hold a price."""


class PriceSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices in dollars per million tokens, such as "2.50". At most 1,000,000, with 6 decimals."""

    example: ClassVar[dict[str, Any]] = {"input": "0.20", "cached_input": "0.05", "output": "0.60"}

    input: Decimal
    output: Decimal
    cached_input: Decimal | None = None
    """Price of prompt tokens found in the cache. Default and maximum: `input`."""


class PriceView(msgspec.Struct, frozen=True):
    """Prices in dollars per million tokens."""

    model: str
    input: str
    cached_input: str
    output: str
    updated_at: datetime
    object: str = "price"

    @classmethod
    def of(cls, price: PriceDetails) -> PriceView:
        return shown(cls, price, **in_dollars(price, PARTS, MICRO))


PRICES = Entity("Price", "/prices", "prices", PriceView, prices.find_price, may_be_new=True)
PRICES.lists(text="Lists prices by model. Models that are not listed are free.")(prices.list_prices)
PRICES.shows("/{model:str}", name="show_price", text="")(prices.find_price)


@PRICES.changes("PUT", "/{model:str}")
async def set_price(connection: Connection, model: str, data: PriceSet) -> PriceDetails:
    """Sets the price for future requests."""
    price = price_of(model, data)
    await models.find_model(connection, model)
    await prices.set_price(connection, price)
    return await prices.find_price(connection, model)


@PRICES.changes("DELETE", "/{model:str}")
async def remove_price(connection: Connection, model: str) -> Deleted:
    """Removes the price. Future requests are free."""
    await prices.find_price(connection, model)
    await prices.remove_price(connection, model)
    return Deleted(model)


def price_of(model: str, data: PriceSet) -> Price:
    """Returns the price in micro-dollars per million tokens. Raises Invalid."""

    def micro(value: Decimal, field: str) -> int:
        return count_dollars(value, MICRO, MAX_DOLLARS, field)

    paid = micro(data.input, "input")
    cached = paid if data.cached_input is None else micro(data.cached_input, "cached_input")
    if cached > paid:
        raise Invalid("cached_input is more than input", "invalid", "cached_input")
    return Price(model, paid, cached, micro(data.output, "output"))
