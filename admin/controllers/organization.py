"""Usage and costs in OpenAI's shape, for dashboards that read theirs. A project is a tenant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Generic, NamedTuple, TypeVar

import msgspec
from litestar import Controller, get

from admin.errors import Invalid
from admin.guards import ADMIN, requires
from admin.money import PICO
from admin.parameters import READS_QUERY
from admin.request import AdminRequest
from admin.usage import UsageQuestion, UsageSum, Width, report

T = TypeVar("T")


class Widths(NamedTuple):
    width: Width
    default: int
    """Buckets a page if nobody says how many."""
    most: int


class Parameters(NamedTuple):
    """What a report can be asked for."""

    widths: Mapping[str, Widths]
    model: str
    """What a base model is called here, to group by; with an s, to select by."""

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
SINGLE = ("start_time", "end_time", "bucket_width", "limit", "page")


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
    """The nearest to the exact sum, which /admin/v1/usage tells."""
    currency: str = "usd"


class CostResult(msgspec.Struct, frozen=True):
    amount: Amount
    line_item: str | None = None
    """The base model: of each its prompts and answers together, its adapters' too."""
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

    @get("/usage/completions", guards=[requires(ADMIN)], opt={READS_QUERY: True})
    async def show_completions(self, request: AdminRequest) -> Buckets[UsageResult]:
        """Every bucket from `start_time` to `end_time`, those without requests too. Raises Invalid
        for a parameter that is wrong or not supported."""
        return await _answer(request, COMPLETIONS, _usage)

    @get("/costs", guards=[requires(ADMIN)], opt={READS_QUERY: True})
    async def show_costs(self, request: AdminRequest) -> Buckets[CostResult]:
        """The same of what it cost."""
        return await _answer(request, COSTS, _cost)


async def _answer(
    request: AdminRequest, parameters: Parameters, result: Callable[[UsageSum, list[str]], T]
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
    stop = min(end, start + limit * wide.width.value)
    asked = UsageQuestion(
        start=start,
        end=stop,
        width=wide.width,
        tenants=given.several("project_ids"),
        models=given.several(f"{parameters.model}s"),
        keys=given.several("api_key_ids"),
        by_tenant="project_id" in given.group_by,
        by_model=parameters.model in given.group_by,
        by_key="api_key_id" in given.group_by,
    )
    async with request.reading() as connection:
        found = await report(connection, asked)
    by_start: dict[datetime, list[T]] = defaultdict(list)
    for each in found:
        by_start[each.start].append(result(each, given.group_by))
    next_page = str(int(stop.timestamp())) if stop < end else None
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


def _usage(found: UsageSum, group_by: list[str]) -> UsageResult:
    return UsageResult(
        input_tokens=found.prompt_tokens,
        output_tokens=found.completion_tokens,
        input_cached_tokens=found.cached_tokens,
        num_model_requests=found.requests,
        project_id=found.tenant_id if "project_id" in group_by else None,
        api_key_id=found.key_id if "api_key_id" in group_by else None,
        model=found.model if "model" in group_by else None,
    )


def _cost(found: UsageSum, group_by: list[str]) -> CostResult:
    return CostResult(
        amount=Amount(float(found.cost.scaleb(-PICO))),
        line_item=found.model if "line_item" in group_by else None,
        project_id=found.tenant_id if "project_id" in group_by else None,
        api_key_id=found.key_id if "api_key_id" in group_by else None,
    )


class Given:
    """The query's parameters; a list may also be spelled `name[]`, as OpenAI's clients do."""

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

    def several(self, name: str) -> list[str] | None:
        """None if it was not given; commas part values too."""
        values = [part for value in self._values.get(name, []) for part in value.split(",")]
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
