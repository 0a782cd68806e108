"""Credits: corrections of a wrong price in recorded usage.

A credit sets the costs of a model's hours to the costs at the right price. It never raises a cost
above the recorded one. A second credit of the same hours replaces the first one, and also covers
usage that was loaded in between.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal

import msgspec

from admin.schemas import shown
from admin.usage.usage import Width
from store.database import Connection
from store.errors import AlreadyExists, Invalid, NotFound
from store.queries import fetch_all, fetch_one, lock_catalog, sql
from store.records import Price

MAX_SPAN = timedelta(days=31)


class CreditFields(Price, frozen=True, kw_only=True):
    """Fields of a credit that the client sets. The prices are the correct prices."""

    id: str
    tenant_id: str | None
    """Id of the tenant. None for all tenants."""
    since: datetime
    """Beginning of the first corrected hour."""
    until: datetime
    """End of the last corrected hour."""
    reason: str


class Credit(CreditFields, frozen=True, kw_only=True):
    requests: int
    cost_before: Decimal
    """Cost of the corrected requests before the credit, in pico-dollars."""
    cost_after: Decimal
    created_at: datetime


class _Repriced(msgspec.Struct, frozen=True):
    requests: int | None
    """Number of corrected requests. None if no usage was recorded for the credit's hours."""
    cost_before: Decimal | None
    cost_after: Decimal | None
    raised: datetime | None
    """First hour whose cost the prices would raise, or None. If it is set, no cost was changed."""


def whole_hours(start: datetime, end: datetime) -> tuple[datetime, datetime]:
    """Returns the beginning of the hour that contains `start`, and the end of the last hour that
    begins before `end`. Raises Invalid for a span that is empty or longer than `MAX_SPAN`."""
    if not start < end <= start + MAX_SPAN:
        days = MAX_SPAN.days
        raise Invalid(f"end must be after start, by up to {days} days", "invalid_range", "end")
    hour = Width.HOUR
    return hour.floor(start), hour.floor(end - timedelta(microseconds=1)) + hour.value


async def list_credits(connection: Connection, after: str, limit: int) -> list[Credit]:
    """Returns up to `limit` credits by id, beginning after the id `after`."""
    return await fetch_all(connection, Credit, "credit_list", after, limit)


async def find_credit(connection: Connection, credit_id: str) -> Credit:
    """Returns a credit. Raises NotFound."""
    missing = NotFound(f"no credit {credit_id[:128]!r}", "credit_not_found", "id")
    return await fetch_one(connection, Credit, "credit_find", credit_id, missing=missing)


async def make_credit(connection: Connection, asked: CreditFields) -> Credit:
    """Corrects the recorded costs, once for each id, and returns the credit. Must be called in a
    transaction.

    Raises AlreadyExists if the id was used for another credit, NotFound if no usage was recorded
    for these hours, and Invalid if the price would raise the recorded cost of an hour.
    """
    # Of two requests with the same id, the second one must find the credit of the first. The lock
    # also delays changes of the catalog.
    await lock_catalog(connection)
    try:
        made = await find_credit(connection, asked.id)
    except NotFound:
        pass
    else:
        if shown(CreditFields, made) != asked:
            raise AlreadyExists(f"the id {asked.id!r} was used for another credit", param="id")
        return made
    which = asked.model, asked.tenant_id, asked.since, asked.until
    prices = asked.input, asked.cached_input, asked.output
    found = await fetch_one(connection, _Repriced, "usage_reprice", *which, *prices)
    if found.requests is None:
        since, until = (f"{moment:%Y-%m-%dT%H:%MZ}" for moment in (asked.since, asked.until))
        raise NotFound(
            f"no usage of {asked.model!r} from {since} to {until}", "usage_not_found", "model"
        )
    if found.raised is not None:
        raise Invalid(
            f"these prices would raise what was recorded for {found.raised:%Y-%m-%dT%H:%MZ}: a"
            " credit can only lower costs",
            "credit_raises_cost",
        )
    sums = found.requests, found.cost_before, found.cost_after
    await connection.execute(sql["credit_insert"], *sums, *msgspec.structs.astuple(asked))
    return await find_credit(connection, asked.id)
