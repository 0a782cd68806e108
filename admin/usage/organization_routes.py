"""Usage and costs in the format of OpenAI's API, for existing dashboards. A project is a tenant. A
tenant's key sees only its own tenant."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from itertools import groupby
from operator import attrgetter
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec
from litestar import Controller, get
from litestar.enums import ParamType
from litestar.openapi.spec import OpenAPIType, Parameter, Schema

from admin.http.guards import ADMIN, USAGE_READ, requires, tenant_for
from admin.http.openapi import AdminOperation
from admin.http.parameters import READS_QUERY
from admin.http.request import AdminRequest
from admin.usage.usage import UsageQuestion, UsageSum, Width, report
from store.errors import Invalid
from store.money import PICO

T = TypeVar("T")


class Widths(NamedTuple):
    width: Width
    default: int
    """Number of buckets in a page if the request has no `limit`."""
    most: int


class Parameters(NamedTuple):
    """Parameters that a report accepts."""

    widths: Mapping[str, Widths]
    model: str
    """OpenAI's name of the base model's dimension, for `group_by`. The same name with an s appended
    is the parameter that selects models."""

    @property
    def dimensions(self) -> tuple[str, ...]:
        return ("project_id", "api_key_id", self.model)

    @property
    def lists(self) -> tuple[str, ...]:
        return ("group_by", "project_ids", "api_key_ids", f"{self.model}s")


COMPLETIONS = Parameters(
    {
        "1m": Widths(Width.MINUTE, 60, 1440),
        "1h": Widths(Width.HOUR, 24, 168),
        "1d": Widths(Width.DAY, 7, 31),
    },
    "model",
)
COSTS = Parameters({"1d": Widths(Width.DAY, 7, 180)}, "line_item")
OURS = {"project_id": "tenant", "api_key_id": "key", "model": "model", "line_item": "model"}
"""Names of our dimensions, by OpenAI's names."""
_COMMA = re.compile(",(?! )")
SINGLE = ("start_time", "end_time", "bucket_width", "limit", "page")
MOST_SUMS = 20_000
"""Maximum number of sums in a page. A page that would have more ends after an earlier bucket, but
the first bucket of a page is always complete."""


def _describe(asked: Parameters) -> list[Parameter]:
    """Returns the parameters of a report, as described in the OpenAPI document."""
    number = Schema(type=OpenAPIType.INTEGER, minimum=0, maximum=99_999_999_999)
    text = Schema(type=OpenAPIType.STRING)
    dimension = Schema(enum=list(asked.dimensions))
    schemas = {
        "start_time": number,
        "end_time": number,
        "page": number,
        "bucket_width": Schema(enum=list(asked.widths)),
        "limit": Schema(type=OpenAPIType.INTEGER, minimum=1, maximum=asked.widths["1d"].most),
        **dict.fromkeys(asked.lists, Schema(type=OpenAPIType.ARRAY, items=text)),
        "group_by": Schema(type=OpenAPIType.ARRAY, items=dimension),
    }
    return [
        Parameter(name, ParamType.QUERY, schema=schema, required=name == "start_time")
        for name, schema in schemas.items()
    ]


class CompletionsOperation(AdminOperation):
    more_parameters = _describe(COMPLETIONS)


class CostsOperation(AdminOperation):
    more_parameters = _describe(COSTS)


class UsageResult(msgspec.Struct, frozen=True):
    input_tokens: int
    output_tokens: int
    input_cached_tokens: int
    num_model_requests: int
    project_id: str | None = None
    user_id: None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: None = None
    service_tier: None = None
    input_audio_tokens: int = 0
    output_audio_tokens: int = 0
    object: str = "organization.usage.completions.result"


class Amount(msgspec.Struct, frozen=True):
    value: float
    """Closest float to the exact sum, which /admin/v1/usage returns."""
    currency: str = "usd"


class CostResult(msgspec.Struct, frozen=True):
    amount: Amount
    line_item: str | None = None
    """Line item, such as `MODEL, cached input`, of a base model with its adapters."""
    project_id: str | None = None
    api_key_id: str | None = None
    user_id: None = None
    quantity: None = None
    quantity_unit: None = None
    object: str = "organization.costs.result"


class Bucket(msgspec.Struct, Generic[T], frozen=True):
    start_time: int
    end_time: int
    results: list[T]
    object: str = "bucket"


class Buckets(msgspec.Struct, Generic[T], frozen=True):
    data: list[Bucket[T]]
    has_more: bool
    next_page: str | None
    object: str = "page"


class OrganizationController(Controller):
    path = "/v1/organization"
    tags = ("organization",)
    guards = (requires(ADMIN, USAGE_READ),)
    opt: ClassVar[Any] = {READS_QUERY: True}

    @get("/usage/completions", operation_class=CompletionsOperation)
    async def show_completions(self, request: AdminRequest) -> Buckets[UsageResult]:
        """Returns every bucket from `start_time` to `end_time`, including those without requests.
        400 for an invalid or unsupported parameter."""
        return await _answer(request, COMPLETIONS, _usage)

    @get("/costs", operation_class=CostsOperation)
    async def show_costs(self, request: AdminRequest) -> Buckets[CostResult]:
        """Returns the costs of every bucket from `start_time` to `end_time`."""
        return await _answer(request, COSTS, _costs)


async def _answer(
    request: AdminRequest,
    parameters: Parameters,
    results: Callable[[Sequence[UsageSum], Given], list[T]],
) -> Buckets[T]:
    given = Given(request, parameters)
    wide = given.width
    limit = given.number("limit", wide.default)
    if not 1 <= limit <= wide.most:
        raise Invalid(f"limit must be from 1 to {wide.most}", "invalid", "limit")
    since = given.moment("page") or given.moment("start_time")
    if since is None:
        raise Invalid("start_time is missing", "missing", "start_time")
    start = wide.width.floor(since)
    end = given.moment("end_time") or datetime.now(UTC)
    if end <= start:
        raise Invalid("end_time must be after start_time", "invalid", "end_time")
    always = ["model"] if parameters is COSTS else []
    asked = UsageQuestion(
        start=start,
        end=min(end, start + limit * wide.width.value),
        width=wide.width,
        tenants=given.several("project_ids"),
        models=given.models,
        keys=given.several("api_key_ids"),
        told_apart=[*map(OURS.__getitem__, given.group_by), *always],
    )
    async with request.reading() as connection:
        if request.user.tenant_id is not None:
            own = [
                (await tenant_for(connection, request.user, project)).id
                for project in asked.tenants or [None]
            ]
            asked = msgspec.structs.replace(asked, tenants=own)
        found = await report(connection, asked, limit=MOST_SUMS + 1)
        if len(found) > MOST_SUMS:
            # The last bucket may be incomplete, so the page ends before it.
            whole = max(found[-1].start, start + wide.width.value)
            asked = msgspec.structs.replace(asked, end=whole)
            found = await report(connection, asked)
    by_time = groupby(found, attrgetter("start"))
    by_start = {start: results(list(sums), given) for start, sums in by_time}
    next_page = str(int(asked.end.timestamp())) if asked.end < end else None
    return Buckets(
        data=_buckets(asked, by_start), has_more=next_page is not None, next_page=next_page
    )


def _buckets(asked: UsageQuestion, by_start: Mapping[datetime, list[T]]) -> list[Bucket[T]]:
    buckets: list[Bucket[T]] = []
    start = asked.start
    while start < asked.end:
        end = start + asked.width.value
        buckets.append(
            Bucket(int(start.timestamp()), int(end.timestamp()), by_start.get(start, []))
        )
        start = end
    return buckets


def _usage(found: Sequence[UsageSum], given: Given) -> list[UsageResult]:
    return [
        UsageResult(
            input_tokens=each.prompt_tokens,
            output_tokens=each.completion_tokens,
            input_cached_tokens=each.cached_tokens,
            num_model_requests=each.requests,
            **given.group_of(each),
        )
        for each in found
    ]


def _costs(found: Sequence[UsageSum], given: Given) -> list[CostResult]:
    """Returns the costs by line item. Omits line items that cost nothing."""
    tells_items = "line_item" in given.group_by
    amounts: dict[tuple[tuple[str, Any], ...], Decimal] = defaultdict(Decimal)
    for each in found:
        for item, cost in _line_items(each):
            if given.wants(item) and (cost or not tells_items):
                group = given.group_of(each) | ({"line_item": item} if tells_items else {})
                amounts[tuple(group.items())] += cost
    return [
        CostResult(Amount(float(amount.scaleb(-PICO))), **dict(group))
        for group, amount in amounts.items()
    ]


def _line_items(found: UsageSum) -> Iterator[tuple[str, Decimal]]:
    """Yields the line items of a sum, with their costs. A cost that was recorded without its parts
    becomes a line item of the model."""
    yield f"{found.model}, input", found.input_cost
    yield f"{found.model}, cached input", found.cached_input_cost
    yield f"{found.model}, output", found.output_cost
    yield found.model, found.unsplit_cost


class Given:
    """Query parameters of a report. OpenAI's clients may name a list parameter `name[]`."""

    def __init__(self, request: AdminRequest, parameters: Parameters) -> None:
        self._values: dict[str, list[str]] = defaultdict(list)
        for name, value in request.query_params.multi_items():
            plain = name.removesuffix("[]")
            if plain not in parameters.lists and name not in SINGLE:
                raise Invalid(f"{name[:64]!r} is not supported", "unsupported", name[:64])
            self._values[plain].append(value)
        widths = parameters.widths
        width = self._values.get("bucket_width", ["1d"])[-1]
        if width not in widths:
            raise Invalid(f"bucket_width can be {', '.join(widths)}", "invalid", "bucket_width")
        self.width = widths[width]
        self.group_by = self.several("group_by") or []
        for name in self.group_by:
            if name not in parameters.dimensions:
                allowed = ", ".join(parameters.dimensions)
                raise Invalid(f"group_by can be {allowed}", "unsupported", "group_by")

        self._selected = self.several(f"{parameters.model}s")

    def group_of(self, found: UsageSum) -> dict[str, Any]:
        """Returns the dimensions of a sum by which results are grouped, without the line item."""
        values = {"project_id": found.tenant_id, "api_key_id": found.key_id, "model": found.model}
        return {name: values[name] for name in self.group_by if name in values}

    @property
    def models(self) -> list[str] | None:
        """Models that the query names, or whose line items it names. None if it names neither."""
        if self._selected is None:
            return None
        return [name.partition(", ")[0] for name in self._selected]

    def wants(self, line_item: str) -> bool:
        """Returns whether a line item is selected. A model's name selects all its line items."""
        selected = self._selected
        return selected is None or line_item in selected or line_item.partition(", ")[0] in selected

    def several(self, name: str) -> list[str] | None:
        """Returns the values of a list parameter, or None if the request does not have it. Commas
        separate values, but a comma before a space belongs to a line item's name."""
        values = [part for value in self._values.get(name, []) for part in _COMMA.split(value)]
        return values or None

    def number(self, name: str, default: int) -> int:
        text = self._values.get(name, [str(default)])[-1]
        if not (text.isascii() and text.isdecimal() and len(text) <= 11):
            raise Invalid(f"{name} must be a number", "invalid", name)
        return int(text)

    def moment(self, name: str) -> datetime | None:
        if name not in self._values:
            return None
        return datetime.fromtimestamp(self.number(name, 0), UTC)
