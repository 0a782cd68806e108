"""Route of usage: sums over time, as JSON or CSV, for people and for billing."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from datetime import MAXYEAR, MINYEAR, UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlencode

import msgspec
from litestar import Controller, Response, get
from litestar.openapi import ResponseSpec
from litestar.openapi.spec import OpenAPIType, Schema
from litestar.params import FromQuery, QueryParameter

from admin.http.guards import ADMIN, USAGE_READ, requires, tenant_for
from admin.http.openapi import AdminOperation
from admin.http.parameters import After, TenantName
from admin.http.request import AdminRequest
from admin.tenants import tenants
from admin.usage.usage import DIMENSIONS, Cursor, UsageQuestion, UsageSum, Width, report
from store.database import Connection
from store.errors import Invalid
from store.money import PICO, format_dollars
from store.records import Caller
from store.stored_text import check_json

DEFAULT_SPAN = timedelta(days=7)
WIDTHS = {"1h": Width.HOUR, "1d": Width.DAY}
TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens", "metered_tokens")
COSTS = ("cost", "input_cost", "cached_input_cost", "output_cost", "credited")
SUMS = ("requests", *TOKENS, *COSTS)


class UsageView(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sum of usage, with the dimensions that it was grouped by. `adapter` is null for requests to
    the base model itself."""

    start: datetime
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    metered_tokens: int
    """Tokens that count against quotas. A cached token counts by its weight."""
    cost: str
    """Cost in exact dollars, at the prices when the requests arrived, with later corrections."""
    input_cost: str
    """Part of the cost for prompt tokens not found in a cache. Like the other two parts, it
    excludes usage from before costs were split."""
    cached_input_cost: str
    output_cost: str
    credited: str
    """Dollars by which corrections of a wrong price have lowered the cost."""
    tenant: str | msgspec.UnsetType = msgspec.UNSET
    """Id of the tenant."""
    tenant_name: str | msgspec.UnsetType = msgspec.UNSET
    """Name of the tenant, even if deleted. Its id if the audit log no longer has the name."""
    model: str | msgspec.UnsetType = msgspec.UNSET
    adapter: str | msgspec.UnsetType | None = msgspec.UNSET
    adapter_version: int | msgspec.UnsetType | None = msgspec.UNSET
    key: str | msgspec.UnsetType = msgspec.UNSET


class UsagePage(msgspec.Struct, frozen=True):
    data: list[UsageView]
    has_more: bool
    after: str | None
    """Cursor of the next page. null on the last one."""
    object: str = "list"


class UsageOperation(AdminOperation):
    other_answers: ClassVar = {"text/csv": Schema(type=OpenAPIType.STRING)}


class UsageController(Controller):
    path = "/usage"
    tags = ("usage",)

    @get(
        guards=[requires(ADMIN, USAGE_READ)],
        operation_class=UsageOperation,
        responses={200: ResponseSpec(UsagePage, generate_examples=False, description="OK")},
    )
    async def show_usage(
        self,
        request: AdminRequest,
        start: FromQuery[datetime | None] = None,
        end: FromQuery[datetime | None] = None,
        bucket: FromQuery[Literal["1h", "1d"]] = "1d",
        group_by: FromQuery[str] = "",
        tenant: TenantName = None,
        format: FromQuery[Literal["json", "csv"] | None] = None,
        after: After = "",
        limit: Annotated[int, QueryParameter(ge=1, le=10_000)] = 1000,
    ) -> Response[Any]:
        """Sums usage in buckets from the one that contains `start` (default: seven days before
        `end`) to the last that begins before `end` (default: now). `group_by` lists some of tenant,
        model, adapter, adapter_version and key, separated by commas. `tenant` may be the id of a
        deleted tenant. CSV is selected by `format` or the Accept header."""
        told = _told_apart(group_by)
        before = aware(end, "end") or datetime.now(UTC)
        since = aware(start, "start") or before - DEFAULT_SPAN
        if since >= before:
            raise Invalid("start must be before end", "invalid_range", "start")
        async with request.reading() as connection:
            whose = None
            if request.user.tenant_id is not None or tenant is not None:
                whose = [await _tenant_id(connection, request.user, tenant)]
            asked = UsageQuestion(
                start=since,
                end=before,
                width=WIDTHS[bucket],
                tenants=whose,
                told_apart=told,
            )
            found = await report(connection, asked, _read_cursor(after), limit + 1)
            ids = {each.tenant_id for each in found} if "tenant" in told else ()
            names = await tenants.names(connection, ids) if ids else {}
        more = _cursor(found[limit - 1]) if len(found) > limit else None
        if format == "csv" or (format is None and "text/csv" in request.headers.get("accept", "")):
            return _csv(request, found[:limit], told, names, more)
        views = [
            UsageView(start=each.start, **_sums(each), **_fields(each, told, names))
            for each in found[:limit]
        ]
        return Response(UsagePage(data=views, has_more=more is not None, after=more))


async def _tenant_id(connection: Connection, caller: Caller, reference: str | None) -> str:
    """Returns the id of the tenant that the request names. Admin keys may name a deleted tenant."""
    if caller.tenant_id is None and reference:
        return (await tenants.find_past_or_present(connection, reference)).id
    return (await tenant_for(connection, caller, reference)).id


def _told_apart(group_by: str) -> list[str]:
    wanted = [name.strip() for name in group_by.split(",") if name.strip()]
    for name in wanted:
        if name not in DIMENSIONS:
            allowed = ", ".join(DIMENSIONS)
            raise Invalid(f"group_by can be {allowed}, not {name[:64]!r}", "invalid", "group_by")
    if "adapter_version" in wanted and "adapter" not in wanted:
        raise Invalid("to group by adapter_version, group by adapter too", "invalid", "group_by")
    return [name for name in DIMENSIONS if name in wanted]


def aware(moment: datetime | None, field: str) -> datetime | None:
    """Returns the time. Raises Invalid if it has no time zone or cannot be converted to UTC."""
    if moment is not None and moment.tzinfo is None:
        raise Invalid(f"{field} needs a time zone, such as a Z at its end", "invalid", field)
    if moment is not None and not MINYEAR < moment.year < MAXYEAR:
        raise Invalid(f"{field} is out of range", "invalid", field)
    return moment


def _fields(found: UsageSum, told: Sequence[str], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns a row's values by grouping column. `names` are the names of tenants, by id."""
    values = {
        "tenant": found.tenant_id,
        "tenant_name": names.get(found.tenant_id, found.tenant_id),
        "model": found.model,
        "adapter": found.adapter or None,
        "adapter_version": found.adapter_version or None,
        "key": found.key_id,
    }
    return {name: values[name] for name in _columns(told)}


def _columns(told: Sequence[str]) -> list[str]:
    """Returns the names of the grouping columns. The column `tenant_name` follows `tenant`."""
    columns: list[str] = []
    for name in told:
        columns += ("tenant", "tenant_name") if name == "tenant" else (name,)
    return columns


def _sums(found: UsageSum) -> dict[str, Any]:
    values = {name: getattr(found, name) for name in SUMS}
    return values | {name: format_dollars(values[name], PICO) for name in COSTS}


def _csv(
    request: AdminRequest,
    found: list[UsageSum],
    told: Sequence[str],
    names: Mapping[str, str],
    more: str | None,
) -> Response[str]:
    """Returns the sums as CSV with column names. The header Link has the next page's URL."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("start", *_columns(told), *SUMS))
    for each in found:
        start = each.start.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        told_apart = [value or "" for value in _fields(each, told, names).values()]
        table.writerow((start, *told_apart, *_sums(each).values()))
    headers: dict[str, str] = {}
    if more is not None:
        query = [item for item in request.query_params.multi_items() if item[0] != "after"]
        headers["link"] = f'<?{urlencode([*query, ("after", more)])}>; rel="next"'
    return Response(text.getvalue(), media_type="text/csv", headers=headers)


def _cursor(last: UsageSum) -> str:
    apart = (last.tenant_id, last.model, last.adapter, last.adapter_version, last.key_id)
    return base64.urlsafe_b64encode(msgspec.json.encode((last.start, *apart))).decode()


def _read_cursor(text: str) -> Cursor | None:
    if not text:
        return None
    try:
        written = base64.urlsafe_b64decode(text)
        cursor = msgspec.json.decode(written, type=Cursor)
    except (ValueError, msgspec.DecodeError) as error:
        raise Invalid("after is not what a page before said", "invalid", "after") from error
    check_json(written, "after")
    aware(cursor[0], "after")
    return cursor
