"""Every route, asked by another tenant's keys for what is not theirs: refused, and in the same
words as for what does not exist."""

from __future__ import annotations

import httpx
import pytest

from store.records import TENANT_SCOPES
from tests.admin.calls import ABSENT, ROUTES, Furnished, furnish
from tests.admin.conftest import Plane
from tests.admin.dump import dump

SCOPES = [*({scope} for scope in sorted(TENANT_SCOPES)), TENANT_SCOPES]


@pytest.fixture
async def furnished(plane: Plane) -> Furnished:
    return await furnish(plane)


@pytest.fixture
async def callers(furnished: Furnished) -> list[httpx.AsyncClient]:
    """globex's keys, one for each of SCOPES."""
    keys = [await furnished.plane.key("globex", scopes=sorted(scopes)) for scopes in SCOPES]
    return [furnished.plane.bearing(str(key["key"])) for key in keys]


def told(answer: httpx.Response, values: dict[str, str]) -> tuple[int, str]:
    """What is answered, whatever was named."""
    body = answer.text
    for value in sorted(values.values(), key=len, reverse=True):
        body = body.replace(f"'{value}'", "it").replace(f"version {value} ", "version it ")
    return answer.status_code, body


async def test_what_is_anothers_is_as_absent(
    furnished: Furnished, callers: list[httpx.AsyncClient]
):
    asked, plane = 0, furnished.plane
    url, before = plane.url.removesuffix("/admin/v1"), await dump(plane.database, but=("key_uses",))
    for route in ROUTES:
        values = furnished.values | route.call.values
        for caller, scopes in zip(callers, SCOPES, strict=True):
            where = (route.name, sorted(scopes))
            if route.call.is_everybodys:
                continue
            if not route.takes("path") and not route.takes("query", "tenant"):
                answer = await caller.request(route.method, url + route.path)
                assert answer.status_code == 403, (where, answer.text)
            # Whose it is, is named where the route takes it, and is not.
            for is_named in (False, True):
                path, arguments = route.request(values, is_named=is_named)
                other, others = route.request(ABSENT, is_named=is_named)
                if (path, arguments) == (other, others):
                    continue  # names nothing: of the caller's own
                answer = await caller.request(route.method, url + path, **arguments)
                absent = await caller.request(route.method, url + other, **others)
                assert answer.status_code in (403, 404), (where, path, answer.text)
                assert told(answer, values) == told(absent, ABSENT), where
                asked += 1
        assert await dump(plane.database, but=("key_uses",)) == before, route.name
    assert asked > 100


async def test_a_new_version_is_not_made_for_another(
    furnished: Furnished, callers: list[httpx.AsyncClient]
):
    """Whose it shall be, and of which upload, stands in the body."""
    before = await dump(furnished.plane.database, but=("key_uses",))
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    for caller, scopes in zip(callers, SCOPES, strict=True):
        statuses = {404} if "adapters:write" in scopes else {403}
        for field, name in (("upload", "upload_id"), ("tenant", "tenant")):
            answers: list[tuple[int, str]] = []
            for values in (furnished.values, ABSENT):
                if field == "upload":
                    body = {"upload": values[name], "name": "bot"}
                    answer = await caller.post("adapters", json=body)
                else:
                    form = {"tenant": values[name], "name": "bot"}
                    answer = await caller.post("adapters", data=form, files=files)
                answers.append(told(answer, values))
            assert answers[0] == answers[1]
            assert answers[0][0] in statuses, answers
    assert await dump(furnished.plane.database, but=("key_uses",)) == before
