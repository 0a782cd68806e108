"""Usage from the rows that gateways write: sums over time, and the retention of rows by day."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated

import msgspec

from store.database import Connection, Database
from store.queries import fetch_all, sql

UPKEEP_INTERVAL_S = 3600.0


DIMENSIONS = ("tenant", "model", "adapter", "adapter_version", "key")
"""Dimensions by which sums can be grouped."""


class Width(Enum):
    """Width of a time bucket. Buckets begin at whole minutes, hours or days in UTC."""

    MINUTE = timedelta(minutes=1)
    HOUR = timedelta(hours=1)
    DAY = timedelta(days=1)

    def floor(self, moment: datetime) -> datetime:
        """Returns the beginning of the bucket that contains `moment`."""
        epoch = datetime(1970, 1, 1, tzinfo=UTC)
        return moment - (moment - epoch) % self.value


class UsageSum(msgspec.Struct, frozen=True):
    """Sum of the usage of requests that were admitted in a time bucket. A dimension by which the
    report does not group is '' or 0."""

    start: datetime
    tenant_id: str
    model: str
    """Served name of the base model."""
    adapter: str
    """Name of the adapter. '' also stands for requests without an adapter."""
    adapter_version: int
    """Version of the adapter. 0 also stands for requests without an adapter."""
    key_id: str
    requests: int
    prompt_tokens: int
    """Number of prompt tokens, including cached ones."""
    cached_tokens: int
    completion_tokens: int
    metered_tokens: int
    """Tokens that count against quotas, in which a cached prompt token counts by its weight."""
    cost: Decimal
    """Whole pico-dollars at the prices valid when requests arrived, with later corrections."""
    input_cost: Decimal
    """Cost of the prompt tokens that were not found in a cache."""
    cached_input_cost: Decimal
    output_cost: Decimal
    credited: Decimal = Decimal(0)
    """Pico-dollars by which corrections of a wrong price lowered `cost`. 0 in sums by minute."""

    @property
    def unsplit_cost(self) -> Decimal:
        """Part of `cost` from requests for which only the total cost was recorded."""
        return self.cost - self.input_cost - self.cached_input_cost - self.output_cost


Cursor = tuple[datetime, str, str, str, Annotated[int, msgspec.Meta(ge=0, lt=2**31)], str]
"""Position of a sum in a report: its start and its dimensions."""


class UsageQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Query for sums in whole buckets, from the bucket that contains `start` to the last that
    begins before `end`."""

    start: datetime
    end: datetime
    width: Width
    tenants: Sequence[str] | None = None
    """Ids of the tenants to select. None selects all, as in `models` and `keys`."""
    models: Sequence[str] | None = None
    keys: Sequence[str] | None = None
    told_apart: Collection[str] = ()
    """Dimensions to group by, each one of `DIMENSIONS`."""


async def report(
    connection: Connection,
    asked: UsageQuestion,
    after: Cursor | None = None,
    limit: int | None = None,
) -> list[UsageSum]:
    """Returns sums, ordered by time and then by dimensions. Must be called in a transaction. Sums
    by minute cover only rows that are still kept, and ignore `after`."""
    await connection.execute(sql["plan_each"])
    start = asked.width.floor(asked.start)
    end = asked.width.floor(asked.end - timedelta(microseconds=1)) + asked.width.value
    which = (asked.tenants, asked.models, asked.keys)
    told = [name in asked.told_apart for name in DIMENSIONS]
    if asked.width is Width.MINUTE:
        args = (start, end, *which, *told, limit)
        return await fetch_all(connection, UsageSum, "usage_report_minutes", *args)
    unit = "hour" if asked.width is Width.HOUR else "day"
    args = (start, end, unit, *which, *told, *(after or (None,) * 6), limit)
    return await fetch_all(connection, UsageSum, "usage_report", *args)


async def keep_days(database: Database, days: int) -> None:
    """Creates the partitions of the next days and drops usage that is more than `days` days old.
    Raises ApiError."""
    async with database.transaction() as connection:
        await connection.execute(sql["usage_upkeep"], days)
