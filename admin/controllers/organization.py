"""Usage in OpenAI's shape, for dashboards that read theirs. A project is a tenant."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
from litestar import Controller, get

from admin.errors import Invalid
from admin.guards import ADMIN, requires
from admin.request import AdminRequest
from admin.usage import UsageQuestion, UsageSum, Width, report


class Widths(NamedTuple):
    width: Width
    default: int
    """Buckets a page if nobody says how many."""
    most: int


WIDTHS = {
    "1m": Widths(Width.MINUTE, 60, 1440),
    "1h": Widths(Width.HOUR, 24, 168),
    "1d": Widths(Width.DAY, 7, 31),
}
LISTS = ("group_by", "project_ids", "api_key_ids", "models")
SINGLE = ("start_time", "end_time", "bucket_width", "limit", "page")
DIMENSIONS = ("project_id", "api_key_id", "model")


class Result(msgspec.Struct, frozen=True):
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


class Bucket(msgspec.Struct, frozen=True):
    start_time: int
    end_time: int
    results: list[Result]
    object: str = "bucket"


class Buckets(msgspec.Struct, frozen=True):
    data: list[Bucket]
    has_more: bool
    next_page: str | None
    object: str = "page"


class OrganizationController(Controller):
    path = "/v1/organization/usage"

    @get("/completions", guards=[requires(ADMIN)])
    async def show_completions(self, request: AdminRequest) -> Buckets:
        """Every bucket from `start_time` to `end_time`, those without requests too. Raises Invalid
        for a parameter that is wrong or not supported."""
        given = Given(request)
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
            models=given.several("models"),
            keys=given.several("api_key_ids"),
            by_tenant="project_id" in given.group_by,
            by_model="model" in given.group_by,
            by_key="api_key_id" in given.group_by,
        )
        async with request.reading() as connection:
            found = await report(connection, asked)
        next_page = str(int(stop.timestamp())) if stop < end else None
        return Buckets(
            data=_buckets(asked, found, given.group_by),
            has_more=next_page is not None,
            next_page=next_page,
        )


def _buckets(asked: UsageQuestion, found: list[UsageSum], group_by: list[str]) -> list[Bucket]:
    by_start: dict[datetime, list[Result]] = defaultdict(list)
    for each in found:
        by_start[each.start].append(_result(each, group_by))
    buckets: list[Bucket] = []
    start = asked.start
    while start < asked.end:
        end = start + asked.width.value
        buckets.append(
            Bucket(int(start.timestamp()), int(end.timestamp()), by_start.get(start, []))
        )
        start = end
    return buckets


def _result(found: UsageSum, group_by: list[str]) -> Result:
    return Result(
        input_tokens=found.prompt_tokens,
        output_tokens=found.completion_tokens,
        input_cached_tokens=found.cached_tokens,
        num_model_requests=found.requests,
        project_id=found.tenant_id if "project_id" in group_by else None,
        api_key_id=found.key_id if "api_key_id" in group_by else None,
        model=found.model if "model" in group_by else None,
    )


class Given:
    """The query's parameters; a list may also be spelled `name[]`, as OpenAI's clients do."""

    def __init__(self, request: AdminRequest) -> None:
        self._values: dict[str, list[str]] = defaultdict(list)
        for name, value in request.query_params.multi_items():
            plain = name.removesuffix("[]")
            if plain not in LISTS and name not in SINGLE:
                raise Invalid(f"{name[:64]!r} is not supported", "unsupported", name[:64])
            self._values[plain].append(value)
        width = self._values.get("bucket_width", ["1d"])[-1]
        if width not in WIDTHS:
            raise Invalid(f"bucket_width can be {', '.join(WIDTHS)}", "invalid", "bucket_width")
        self.width = WIDTHS[width]
        self.group_by = self.several("group_by") or []
        for name in self.group_by:
            if name not in DIMENSIONS:
                allowed = ", ".join(DIMENSIONS)
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
