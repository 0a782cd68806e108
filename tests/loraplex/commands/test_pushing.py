"""Uploads in pieces over connections that break."""

import asyncio
import io
import random
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar import Litestar

from adapters.format.validator import CONFIG_NAME, WEIGHTS_NAME
from admin.http.tenant_rates import TenantRates
from admin.uploads.upload import MAX_FORMS_OF_TENANT as MAX_OF_TENANT
from loraplex.api import Api
from loraplex.errors import ApiFailure, NoAnswer, Refused
from loraplex.pushing import push, push_in_pieces
from loraplex.tar import Tar
from store.records import ServingData
from tests.adapters.files import write_adapter
from tests.admin.conftest import Plane
from tests.admin.lifecycle import add
from web.errors import RateExceeded


def test_any_part_of_the_archive_can_be_read(tmp_path: Path):
    files = [tmp_path / name for name in ("a", "b", "c")]
    contents = [b"x" * 511, b"", bytes(range(256)) * 4]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    archive = Tar(files)
    whole = archive.read(0, archive.size)
    assert len(whole) == archive.size
    with tarfile.open(fileobj=io.BytesIO(whole)) as read:
        assert read.getnames() == ["a", "b", "c"]
        members = [read.extractfile(name) for name in read.getnames()]
        assert [member.read() if member else None for member in members] == contents
    rng = random.Random(1)
    for _ in range(200):
        offset, size = rng.randrange(archive.size), rng.randrange(1, 2000)
        assert archive.read(offset, size) == whole[offset : offset + size]


@asynccontextmanager
async def breaking_proxy(target: str, rng: random.Random, budget: int) -> AsyncIterator[str]:
    """A way to `target` on which the first `budget` connections break after some bytes, sent or,
    but for the first, received."""
    host, _, port = target.removeprefix("http://").partition(":")
    left = budget

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int) -> None:
        while most > 0 and (data := await reader.read(min(most, 4096))):
            writer.write(data)
            await writer.drain()
            most -= len(data)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        up, down = 1 << 40, 1 << 40
        if left > 0:
            is_first = left == budget
            left -= 1
            if is_first or rng.random() < 0.7:
                up = rng.randrange(1000, 20_000)
            else:
                down = 10
        there = await asyncio.open_connection(host, int(port))
        ways = [
            asyncio.create_task(pump(reader, there[1], up)),
            asyncio.create_task(pump(there[0], writer, down)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for each in (writer, there[1]):
            each.transport.abort()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize("seed", range(4))
async def test_an_upload_goes_on_where_the_connection_broke(
    plane: Plane, base: str, tmp_path: Path, seed: int
):
    await plane.tenant("acme")
    digest = write_adapter(tmp_path / "a", rank=16, seed=seed)
    size = sum(file.stat().st_size for file in (tmp_path / "a").iterdir())
    reported: list[int] = []

    def push(url: str) -> dict[str, object]:
        with Api(url, key) as api:
            fields = {"name": "bot", "tenant": "acme", "serving": {"stop": ["x"]}}
            report = lambda done, _total: reported.append(done)  # noqa: E731
            return push_in_pieces(api, tmp_path / "a", fields, report, piece_bytes=10_000)

    key = plane.client.headers["authorization"].removeprefix("Bearer ")
    url = plane.url.removesuffix("/admin/v1")
    async with breaking_proxy(url, random.Random(seed), budget=12) as broken:
        made = await asyncio.to_thread(push, broken)
    assert (made["version"], made["digest"]) == (1, digest)
    assert reported == sorted(reported)
    assert size < reported[-1] < size + 4096
    found = (await plane.client.get("adapters/bot", params={"tenant": "acme"})).json()
    assert [version["serving"]["stop"] for version in found["versions"]] == [["x"]]


async def test_an_answer_that_was_lost_is_found_behind_a_hundred_versions(
    plane: Plane, base: str, tmp_path: Path
):
    """The upload is gone, for it was completed: the version that came of it is the newest."""
    await plane.tenant("acme")
    digest = write_adapter(tmp_path / "a")
    async with plane.database.transaction() as connection:
        tenant_id = await connection.fetchval("SELECT id FROM tenants")
        for number in range(100):
            await add(connection, tenant_id, "f", serving=ServingData(metadata={"n": str(number)}))
    key = plane.client.headers["authorization"].removeprefix("Bearer ")

    class Losing(Api):
        def post(self, path: str, body: dict[str, Any] | None = None, **query: Any) -> Any:
            made = super().post(path, body, **query)
            if path == "/admin/v1/adapters":
                raise NoAnswer("lost")
            return made

    def push() -> dict[str, Any]:
        with Losing(plane.url.removesuffix("/admin/v1"), key) as api:
            fields = {"name": "bot", "tenant": "acme"}
            return push_in_pieces(api, tmp_path / "a", fields, lambda _done, _total: None)

    made = await asyncio.to_thread(push)
    assert (made["version"], made["digest"]) == (101, digest)


class Busy(TenantRates):
    """Refuses each second call."""

    num_calls = 0

    def take(self, tenant_id: str, *, is_write: bool) -> None:
        self.num_calls += 1
        if self.num_calls % 2:
            raise RateExceeded("too often", retry_after_s=7)


async def test_a_push_goes_on_at_the_pace_that_the_server_allows(
    plane: Plane, app: Litestar, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    acme = await plane.tenant("acme")
    app.state.admin.tenant_rates = Busy(60)
    digest = write_adapter(tmp_path)
    key = acme.headers["authorization"].removeprefix("Bearer ")
    pauses: list[float] = []
    monkeypatch.setattr("loraplex.api.sleep", pauses.append)

    def push_bot(patience_s: float) -> dict[str, Any]:
        with Api(plane.url.removesuffix("/admin/v1"), key) as api:
            api.patience_s = patience_s
            return push(api, tmp_path, {"name": "bot"}, lambda _done, _total: None)

    with pytest.raises(Refused, match="too often"):
        await asyncio.to_thread(push_bot, 6)
    assert pauses == []
    made = await asyncio.to_thread(push_bot, 60)
    assert (made["version"], made["digest"]) == (1, digest)
    assert len(pauses) > 1 and set(pauses) == {7}


async def test_a_push_outlasts_a_server_that_is_away_for_a_while(
    plane: Plane, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Answers are lost after the server has done what was asked. One that never answered is not
    waited for."""
    await plane.tenant("acme")
    write_adapter(tmp_path)
    key = plane.client.headers["authorization"].removeprefix("Bearer ")
    request, calls, pauses = httpx.Client.request, count(), list[float]()

    def lose_each_second(client: httpx.Client, *arguments: Any, **options: Any) -> httpx.Response:
        answer = request(client, *arguments, **options)
        if next(calls) % 2:
            raise httpx.ReadError("lost")
        return answer

    def push_bot(patience_s: float) -> dict[str, Any]:
        with Api(plane.url.removesuffix("/admin/v1"), key) as api:
            api.patience_s = patience_s
            fields = {"name": "bot", "tenant": "acme"}
            return push(api, tmp_path, fields, lambda _done, _total: None)

    monkeypatch.setattr("loraplex.api.sleep", pauses.append)
    monkeypatch.setattr(httpx.Client, "request", lose_each_second)
    assert (await asyncio.to_thread(push_bot, 60))["version"] == 1
    assert pauses
    found = (await plane.client.get("adapters/bot", params={"tenant": "acme"})).json()
    assert len(found["versions"]) == 1
    calls, pauses[:] = count(1), []
    with pytest.raises(NoAnswer):
        await asyncio.to_thread(push_bot, 60)
    assert pauses == []


async def test_what_is_refused_is_not_sent_again(plane: Plane, base: str, tmp_path: Path):
    write_adapter(tmp_path)
    (tmp_path / CONFIG_NAME).write_text("{}")
    key = plane.client.headers["authorization"].removeprefix("Bearer ")
    await plane.tenant("acme")

    def push() -> None:
        with Api(plane.url.removesuffix("/admin/v1"), key) as api:
            fields = {"name": "bot", "tenant": "acme"}
            push_in_pieces(api, tmp_path, fields, lambda _done, _total: None)

    with pytest.raises(Refused, match="peft_type"):
        await asyncio.to_thread(push)
    assert (tmp_path / WEIGHTS_NAME).exists()
    assert plane.files() == set()


async def test_a_configuration_is_refused_before_the_weights_are_sent(
    plane: Plane, base: str, tmp_path: Path
):
    acme = await plane.tenant("acme")
    write_adapter(tmp_path)
    (tmp_path / CONFIG_NAME).write_text('{"peft_type": "IA3"}')
    key = acme.headers["authorization"].removeprefix("Bearer ")
    sent: list[int] = []

    def push_bot() -> None:
        with Api(plane.url.removesuffix("/admin/v1"), key) as api:
            push(api, tmp_path, {"name": "bot"}, lambda done, _total: sent.append(done))

    with pytest.raises(Refused, match=r"field    peft_type\n  got      IA3"):
        await asyncio.to_thread(push_bot)
    assert sent == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alias": "7"}, "an alias is 1 to 64 letters"),
        ({"name": "tiny"}, "a base model is named tiny"),
        ({"serving": {"stop": 7}}, "serving: Expected"),
        ({"model": "none"}, "no base model 'none'"),
    ],
)
async def test_what_the_fields_say_is_refused_before_anything_is_sent(
    plane: Plane, base: str, tmp_path: Path, fields: dict[str, Any], message: str
):
    acme = await plane.tenant("acme")
    write_adapter(tmp_path)
    key = acme.headers["authorization"].removeprefix("Bearer ")
    sent: list[int] = []

    def push_bot() -> None:
        with Api(plane.url.removesuffix("/admin/v1"), key) as api:
            push(api, tmp_path, {"name": "bot", **fields}, lambda done, _total: sent.append(done))

    with pytest.raises(ApiFailure, match=message):
        await asyncio.to_thread(push_bot)
    assert sent == []


async def test_a_push_waits_while_as_many_as_may_be_are_under_way(
    plane: Plane, base: str, tmp_path: Path
):
    acme = await plane.tenant("acme")
    write_adapter(tmp_path / "a")
    files = {name: (tmp_path / "a" / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)}
    request = acme.build_request("POST", "adapters", data={"name": "other"}, files=files)
    body, headers = await request.aread(), {"content-type": request.headers["content-type"]}
    go_on = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[: len(body) // 2]
        await go_on.wait()
        yield body[len(body) // 2 :]

    posts = [acme.post("adapters", content=slowly(), headers=headers) for _ in range(MAX_OF_TENANT)]
    others = [asyncio.create_task(post) for post in posts]
    async with asyncio.timeout(60):
        while len(list((plane.store / "incoming").glob(f"*/{WEIGHTS_NAME}"))) < len(others):
            await asyncio.sleep(0.02)
    key = acme.headers["authorization"].removeprefix("Bearer ")

    def push_bot() -> dict[str, Any]:
        with Api(plane.url.removesuffix("/admin/v1"), key) as api:
            return push(api, tmp_path / "a", {"name": "bot"}, lambda _done, _total: None)

    pushing = asyncio.create_task(asyncio.to_thread(push_bot))
    done, _ = await asyncio.wait({pushing}, timeout=1.0)
    assert not done
    go_on.set()
    assert (await pushing)["version"] == 1
    assert {answer.status_code for answer in await asyncio.gather(*others)} == {200, 201}
