"""Routes of the prices of base models and their adapters: list, show, set, remove."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar

import msgspec
from litestar import Controller, delete, get, put
from litestar.params import FromPath, JSONBody

from admin.http import preconditions
from admin.http.entities import read_page
from admin.http.guards import ADMIN, requires
from admin.http.parameters import After, Limit
from admin.http.preconditions import IfMatch, Tagged, tagged
from admin.http.request import AdminRequest
from admin.models import models
from admin.prices import prices
from admin.prices.prices import PriceDetails
from admin.schemas import Deleted, Page, shown
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


class PriceController(Controller):
    path = "/prices"
    tags = ("prices",)
    guards = (requires(ADMIN),)

    @get()
    async def list_prices(
        self, request: AdminRequest, after: After = "", limit: Limit = 100
    ) -> Page[PriceView]:
        """Lists prices by model. Models that are not listed are free."""
        return await read_page(request, limit, PriceView.of, prices.list_prices, after)

    @get("/{model:str}")
    async def show_price(self, request: AdminRequest, model: FromPath[str]) -> Tagged[PriceView]:
        async with request.reading() as connection:
            return tagged(await _describe(connection, model))

    @put("/{model:str}")
    async def set_price(
        self,
        request: AdminRequest,
        model: FromPath[str],
        data: JSONBody[PriceSet],
        if_match: IfMatch = None,
    ) -> Tagged[PriceView]:
        """Sets the price for future requests."""
        price = price_of(model, data)
        async with request.transaction() as connection:
            await models.find_model(connection, model)
            await preconditions.lock(connection, if_match, _describe, model)
            await prices.set_price(connection, price)
            return tagged(await _describe(connection, model))

    @delete("/{model:str}", status_code=200)
    async def remove_price(
        self, request: AdminRequest, model: FromPath[str], if_match: IfMatch = None
    ) -> Deleted:
        """Removes the price. Future requests are free."""
        async with request.transaction() as connection:
            await preconditions.lock(connection, if_match, _describe, model)
            await prices.find_price(connection, model)
            await prices.remove_price(connection, model)
        return Deleted(model)


async def _describe(connection: Connection, model: str) -> PriceView:
    return PriceView.of(await prices.find_price(connection, model))


def price_of(model: str, data: PriceSet) -> Price:
    """Returns the price in micro-dollars per million tokens. Raises Invalid."""

    def micro(value: Decimal, field: str) -> int:
        return count_dollars(value, MICRO, MAX_DOLLARS, field)

    paid = micro(data.input, "input")
    cached = paid if data.cached_input is None else micro(data.cached_input, "cached_input")
    if cached > paid:
        raise Invalid("cached_input is more than input", "invalid", "cached_input")
    return Price(model, paid, cached, micro(data.output, "output"))
