"""Uploads in pieces: resumed after anything, seen by their owners alone, gone when abandoned."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapters.format.validator import CONFIG_NAME, AdapterFiles, content_digest
from adapters.store.folder import LocalStore
from admin.http.plane import AdminConfig
from admin.uploads.file_sink import FileSink
from admin.uploads.resumable import MAX_OPEN
from store.database import Database
from tests.adapters.files import write_adapter
from tests.admin.conftest import MAX_UPLOAD_BYTES, PEPPER, Plane, write_model
from tests.admin.http.test_routes import problem
from tests.admin.serve import PATH, admin_key, admin_process, administration
from tests.admin.uploads.test_upload import parts, tar_of, zip_of
from tests.admin.uploads.test_validation import WIDE, write_slow
from tests.stored import kept


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def archive(folder: Path) -> bytes:
    return tar_of(folder)


async def announce(client: httpx.AsyncClient, num_bytes: int, name: str = "a.tar") -> str:
    """The id of a new upload."""
    answer = await client.post("uploads", json={"bytes": num_bytes, "filename": name})
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert (made["object"], made["bytes"], made["offset"]) == ("upload", num_bytes, 0)
    return made["id"]


async def append(client: httpx.AsyncClient, upload: str, offset: int, body: Any) -> httpx.Response:
    headers = {"upload-offset": str(offset)}
    return await client.patch(f"uploads/{upload}", content=body, headers=headers)


@pytest.fixture
def has_received(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Event that is set once the plane has received bytes of an upload."""
    event, write = asyncio.Event(), FileSink.write

    async def write_and_set(sink: FileSink, chunk: bytes | bytearray) -> None:
        await write(sink, chunk)
        event.set()

    monkeypatch.setattr(FileSink, "write", write_and_set)
    return event


async def complete(client: httpx.AsyncClient, upload: str, **fields: Any) -> httpx.Response:
    return await client.post("adapters", json={"upload": upload, "name": "bot", **fields})


@pytest.mark.parametrize("kind", ["tar", "zip"])
async def test_pieces_of_any_size_make_a_version(
    plane: Plane, base: str, folder: Path, kind: str
) -> None:
    acme = await plane.tenant("acme")
    data = tar_of(folder) if kind == "tar" else zip_of(folder)
    upload = await announce(acme, len(data), f"adapter.{kind}")
    rng, offset = random.Random(kind), 0
    while offset < len(data):
        piece = data[offset : offset + rng.randrange(1, 40_000)]
        answer = await append(acme, upload, offset, piece)
        offset += len(piece)
        assert answer.json()["offset"] == offset
        assert (await acme.get(f"uploads/{upload}")).json()["offset"] == offset
    answer = await complete(
        acme,
        upload,
        model="tiny",
        alias="staging",
        sha256=hashlib.sha256(data).hexdigest(),
        serving={"stop": ["\n"], "metadata": {"run": "7"}},
    )
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert made["digest"] == content_digest(AdapterFiles.in_folder(folder))
    assert (made["wanted_alias"], made["serving"]["stop"]) == ("staging", ["\n"])
    assert plane.files() == {made["digest"]}
    problem(await acme.get(f"uploads/{upload}"), 404)


async def test_the_offset_must_be_what_has_come(plane: Plane, base: str, archive: bytes) -> None:
    acme = await plane.tenant("acme")
    upload = await announce(acme, len(archive))
    await append(acme, upload, 0, archive[:1000])
    for wrong in (0, 999, 1001, len(archive)):
        refused = problem(await append(acme, upload, wrong, archive[wrong:]), 409)
        assert (refused["code"], refused["offset"]) == ("upload_offset", 1000)
    for header in ({}, {"upload-offset": "-1"}, {"upload-offset": "1e3"}, {"upload-offset": ""}):
        answer = await acme.patch(f"uploads/{upload}", content=b"x", headers=header)
        assert problem(answer, 400)["param"] == "upload-offset"
    refused = problem(await complete(acme, upload), 409)
    assert (refused["code"], refused["offset"]) == ("upload_offset", 1000)
    assert (await append(acme, upload, 1000, archive[1000:])).json()["offset"] == len(archive)
    assert (await complete(acme, upload)).status_code == 201


async def test_no_byte_more_than_was_declared_is_kept(plane: Plane, archive: bytes) -> None:
    acme = await plane.tenant("acme")
    upload = await announce(acme, 1000)
    data = plane.store / "incoming" / upload / "data"
    problem(await append(acme, upload, 0, archive), 413)
    assert data.stat().st_size == 0

    async def of_unknown_length() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * 300

    problem(await append(acme, upload, 0, of_unknown_length()), 413)
    assert data.stat().st_size <= 1000
    for size, status in ((0, 400), (-1, 400), (1 << 60, 400), (3 * MAX_UPLOAD_BYTES, 413)):
        answer = await acme.post("uploads", json={"bytes": size, "filename": "a.tar"})
        problem(answer, status)
    for body in ({"bytes": 5, "filename": "adapter.bin"}, {"bytes": 5}, {"filename": "a.tar"}):
        problem(await acme.post("uploads", json=body), 400)


async def test_an_upload_is_its_tenants_and_the_admins(
    plane: Plane, base: str, archive: bytes
) -> None:
    acme, globex = await plane.tenant("acme"), await plane.tenant("globex")
    upload = await announce(acme, len(archive))
    admins = await announce(plane.client, len(archive))
    strangers = [(globex, upload), (acme, admins), (globex, "upl_" + "0" * 24), (acme, "upl_..")]
    strangers += [
        (plane.client, "upload.json"),
        (acme, "upl_" + "é" * 24),
    ]
    for client, target in strangers:
        problem(await client.get(f"uploads/{target}"), 404)
        problem(await append(client, target, 0, b"x"), 404)
        problem(await client.delete(f"uploads/{target}"), 404)
        problem(await complete(client, target), 404)
    assert (await append(plane.client, upload, 0, archive)).status_code == 200
    answer = await complete(plane.client, upload, tenant="acme")
    assert answer.status_code == 201, answer.text
    assert (await acme.get("adapters/bot")).status_code == 200
    assert (await plane.client.delete(f"uploads/{admins}")).json()["id"] == admins
    problem(await plane.client.get(f"uploads/{admins}"), 404)
    assert len(plane.files()) == 1


async def test_a_piece_that_breaks_off_counts_as_far_as_it_came(
    plane: Plane, base: str, archive: bytes, has_received: asyncio.Event
) -> None:
    acme = await plane.tenant("acme")
    upload = await announce(acme, len(archive))

    async def cut() -> AsyncIterator[bytes]:
        yield archive[:5000]
        await asyncio.wait_for(has_received.wait(), 60)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await append(acme, upload, 0, cut())
    async with asyncio.timeout(60):
        while (offset := (await acme.get(f"uploads/{upload}")).json()["offset"]) == 0:
            await asyncio.sleep(0.02)
    assert 0 < offset <= 5000
    async with asyncio.timeout(60):
        while (await append(acme, upload, offset, archive[offset:])).status_code == 409:
            await asyncio.sleep(0.02)
    assert (await complete(acme, upload)).status_code == 201


async def test_a_tenant_has_a_few_open_uploads_at_a_time(plane: Plane, archive: bytes) -> None:
    """Who may have a kilobyte of adapters does not fill the disk with what is never complete."""
    acme, globex = await plane.tenant("acme"), await plane.tenant("globex")
    announced = {"bytes": MAX_UPLOAD_BYTES, "filename": "adapter.tar"}
    asked = [acme.post("uploads", json=announced) for _ in range(3 * MAX_OPEN)]
    answers = await asyncio.gather(*asked)
    made = [answer.json()["id"] for answer in answers if answer.status_code == 201]
    assert len(made) == MAX_OPEN
    for answer in answers:
        if answer.status_code != 201:
            assert problem(answer, 409)["code"] == "too_many_uploads"
    for client in (globex, plane.client):
        await announce(client, len(archive))
    assert (await acme.delete(f"uploads/{made[0]}")).status_code == 200
    await announce(acme, len(archive))


async def test_one_request_at_a_time_works_on_an_upload(
    plane: Plane, archive: bytes, has_received: asyncio.Event
) -> None:
    acme = await plane.tenant("acme")
    upload = await announce(acme, len(archive))
    go_on = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield archive[:10]
        await go_on.wait()
        yield archive[10:]

    first = asyncio.create_task(append(acme, upload, 0, slowly()))
    await asyncio.wait_for(has_received.wait(), 60)
    busy = problem(await append(acme, upload, 0, archive), 409)
    assert busy["code"] == "upload_busy"
    assert problem(await acme.delete(f"uploads/{upload}"), 409)["code"] == "upload_busy"
    go_on.set()
    assert (await first).json()["offset"] == len(archive)


async def test_what_is_wrong_with_the_upload_ends_it_and_nothing_else_does(
    plane: Plane, base: str, folder: Path, archive: bytes
) -> None:
    acme = await plane.tenant("acme")
    upload = await announce(acme, len(archive))
    await append(acme, upload, 0, archive)
    for fields, status in [
        ({"sha256": "0" * 64}, 400),
        ({"model": "none"}, 404),
        ({"serving": {"stops": []}}, 400),
        ({"serving": 7}, 400),
        ({"extra": 1}, 400),
        ({"name": None}, 400),
        ({"name": "tiny"}, 409),
    ]:
        problem(await complete(acme, upload, **fields), status)
    assert (await acme.get(f"uploads/{upload}")).json()["offset"] == len(archive)
    assert (await complete(acme, upload)).status_code == 201

    (folder / CONFIG_NAME).write_text('{"peft_type": "IA3"}')
    bad = tar_of(folder)
    upload = await announce(acme, len(bad))
    await append(acme, upload, 0, bad)
    refused = problem(await complete(acme, upload, name="other"), 400)
    assert refused["field"] and refused["allowed"]
    problem(await acme.get(f"uploads/{upload}"), 404)
    problem(await acme.get("adapters/other"), 404)
    rejected = (await acme.get("uploads/rejected")).json()["data"]
    assert [each["name"] for each in rejected] == ["other"]
    assert len(plane.files()) == 1


async def test_the_body_of_a_completion_is_bounded_and_named(plane: Plane, base: str) -> None:
    acme = await plane.tenant("acme")
    huge = {"upload": "upl_" + "0" * 24, "name": "x" * (2 << 20)}
    problem(await acme.post("adapters", json=huge), 413)
    problem(await acme.post("adapters", content=b"[]", headers={"content-type": "text/x"}), 400)
    answer = await acme.post("adapters", content=b"{", headers={"content-type": "application/json"})
    problem(answer, 400)
    upload = await announce(acme, 1)
    await append(acme, upload, 0, b"x")
    body = b'{"upload": "%s", "name": "bot", "serving": {"stop": ["\xff"]}}' % upload.encode()
    answer = await acme.post("adapters", content=body, headers={"content-type": "application/json"})
    assert problem(answer, 400)["code"] == "serving_invalid"
    assert (await acme.delete(f"uploads/{upload}")).status_code == 200
    assert plane.files() == set()


@pytest.mark.full
async def test_a_killed_process_loses_nothing_it_acknowledged(
    dsn: str, database: Database, tmp_path: Path, folder: Path, archive: bytes
) -> None:
    store = tmp_path / "store"
    write_model(store, "b" * 64)
    key = await admin_key(database)
    rng = random.Random(11)
    upload, offset = "", 0
    server = admin_process(tmp_path / "admin", dsn, store)
    while offset < len(archive):
        async with server, server.new_client(key, PATH) as client:
            if not upload:
                await client.post("tenants", json={"name": "acme"})
                await client.post("models", json={"name": "tiny", "digest": "b" * 64})
                upload = await announce(client, len(archive))
            found = (await client.get(f"uploads/{upload}")).json()["offset"]
            assert found >= offset
            offset = found
            for _ in range(rng.randrange(1, 4)):
                piece = archive[offset : offset + len(archive) // 5]
                offset = (await append(client, upload, offset, piece)).json()["offset"]
            dying = asyncio.create_task(append(client, upload, offset, archive[offset:]))
            await asyncio.sleep(rng.random() * 0.02)
            await server.kill()
            await asyncio.gather(dying, return_exceptions=True)
    async with administration(database, store) as client:
        answer = await complete(client, upload, tenant="acme")
        assert answer.status_code == 201, answer.text
        assert answer.json()["digest"] == content_digest(AdapterFiles.in_folder(folder))
    assert list(LocalStore(store).incoming.iterdir()) == []


@pytest.mark.full
async def test_what_is_given_up_leaves_nothing(
    database: Database, tmp_path: Path, folder: Path, archive: bytes
) -> None:
    """The product's minute, shortened to a second: an upload announced and forgotten, a
    piece and a form of which no more comes, what a dead process left. Slow ones are not touched."""
    store = LocalStore(tmp_path / "store")
    write_model(tmp_path / "store", "b" * 64)
    wide = {"hidden_size": WIDE.hidden_size}
    write_model(tmp_path / "store", "e" * 64, **wide)
    (store.stage() / "left behind").write_bytes(b"x")

    async def stalling() -> AsyncIterator[bytes]:
        yield body[: len(body) // 2]
        await asyncio.sleep(2)
        yield body[len(body) // 2 :]

    async def slowly() -> AsyncIterator[bytes]:
        for start in range(0, len(body), len(body) // 6):
            yield body[start : start + len(body) // 6]
            await asyncio.sleep(0.2)

    config = AdminConfig(pepper=PEPPER, upload_idle_s=1.0, min_upload_rate=64)
    async with administration(database, store, config) as client:
        await client.post("tenants", json={"name": "acme"})
        for name, digest in (("tiny", "b"), ("wide", "e")):
            await client.post("models", json={"name": name, "digest": digest * 64})
        fields = {"name": "bot", "tenant": "acme", "model": "tiny"}
        request = client.build_request("POST", "adapters", data=fields, files=parts(folder))
        body = await request.aread()
        kind = {"content-type": request.headers["content-type"]}

        forgotten = await announce(client, len(archive))
        expiry = (await client.get(f"uploads/{forgotten}")).json()["expires_at"]
        assert datetime.fromisoformat(expiry) > datetime.now(UTC)
        stalled = asyncio.create_task(client.post("adapters", content=stalling(), headers=kind))
        piece = await announce(client, len(body))
        hanging = asyncio.create_task(append(client, piece, 0, stalling()))
        slow = asyncio.create_task(client.post("adapters", content=slowly(), headers=kind))
        for answer in await asyncio.gather(stalled, hanging):
            assert problem(answer, 408)["code"] == "request_timeout"
        assert (await slow).status_code == 201

        # Unpacking and validating outlast several rounds of sweeping.
        long = {"file": ("adapter.zip", zip_of(write_slow(tmp_path / "slow", WIDE)))}
        fields = {"name": "wide-bot", "tenant": "acme", "model": "wide"}
        answer = await client.post("adapters", data=fields, files=long)
        assert answer.status_code == 201, answer.text
        async with asyncio.timeout(30):
            while list(store.incoming.iterdir()):
                await asyncio.sleep(0.05)
        problem(await client.get(f"uploads/{forgotten}"), 404)
    assert len(kept(store, "adapters")) == 2
