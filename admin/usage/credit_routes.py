"""Routes of credits: list, show, make."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar

import msgspec

from admin.http.entities import Entity
from admin.keys.schemas import Moment
from admin.prices.routes import PARTS, PriceSet, price_of
from admin.schemas import shown
from admin.tenants import tenants
from admin.usage import credits
from admin.usage.credits import Credit, CreditFields
from admin.usage.routes import aware
from store.database import Connection
from store.money import MICRO, PICO, in_dollars


class CreditSet(PriceSet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Right price of a model, in dollars per million tokens, and the usage that it applies to: from
    the hour that contains `start` to the last that begins before `end`, up to 31 days."""

    example: ClassVar[dict[str, Any]] = {
        "model": "smollm2-135m-instruct",
        "input": "0.20",
        "output": "0.60",
        "start": "2027-01-04T09:00:00Z",
        "end": "2027-01-04T14:00:00Z",
        "reason": "20.00 was set in place of 0.20",
    }

    model: str
    """Served name of the base model, which may have been removed."""
    start: Moment
    end: Moment
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
    tenant: str | None = None
    """Id or name of a tenant, or the id of a deleted tenant. Default: all tenants."""


class CreditView(msgspec.Struct, frozen=True):
    """Correction of recorded costs."""

    id: str
    model: str
    tenant_id: str | None
    """Id of the tenant. null for all tenants."""
    since: datetime
    until: datetime
    input: str
    """Dollars per million tokens, like the other two prices."""
    cached_input: str
    output: str
    reason: str
    requests: int
    cost_before: str
    """Dollars that the corrected requests cost before the credit."""
    cost_after: str
    created_at: datetime
    object: str = "credit"

    @classmethod
    def of(cls, credit: Credit) -> CreditView:
        costs = in_dollars(credit, ("cost_before", "cost_after"), PICO)
        return shown(cls, credit, **in_dollars(credit, PARTS, MICRO), **costs)


CREDITS = Entity("Credit", "/usage/credits", "usage", CreditView)
CREDITS.lists(text="Lists credits by id.")(credits.list_credits)
CREDITS.shows("/{credit_id:str}", name="show_credit", text="")(credits.find_credit)


@CREDITS.changes("PUT", "/{credit_id:str}")
async def make_credit(connection: Connection, credit_id: str, data: CreditSet) -> Credit:
    """Lowers recorded costs to the costs at the right price, and the use of spend limits with
    them. Done once for each id, which the client chooses. A repeated request with the same body
    changes nothing and gets the first answer. A later credit of the same hours replaces this
    one, and covers usage that was recorded in between. 400 if a cost would rise."""
    aware(data.start, "start")
    aware(data.end, "end")
    since, until = credits.whole_hours(data.start, data.end)
    tenant_id = None
    if data.tenant is not None:
        tenant_id = (await tenants.find_past_or_present(connection, data.tenant)).id
    asked = CreditFields(
        **msgspec.structs.asdict(price_of(data.model, data)),
        id=credit_id,
        tenant_id=tenant_id,
        since=since,
        until=until,
        reason=data.reason,
    )
    return await credits.make_credit(connection, asked)
