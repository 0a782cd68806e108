"""Uploads over real HTTP: what is taken, what is refused, and what stays of it."""

import asyncio
import hashlib
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapters.format.module_list import read_module_list
from adapters.format.validator import CONFIG_NAME, WEIGHTS_NAME, AdapterFiles, content_digest
from adapters.manifest import PROJECTIONS
from admin.adapters.versions import MAX_REJECTED
from admin.uploads import upload
from admin.uploads.upload import MAX_FORMS, MAX_FORMS_OF_TENANT
from tests.adapters.files import write_adapter
from tests.admin.conftest import MAX_UPLOAD_BYTES, Plane, write_model
from tests.admin.http.test_routes import problem
from tests.admin.lifecycle import prove_all


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapter")
    return tmp_path / "adapter"


def parts(folder: Path) -> dict[str, Any]:
    return {name: (name, (folder / name).read_bytes()) for name in (CONFIG_NAME, WEIGHTS_NAME)}


async def push(client: httpx.AsyncClient, folder: Path, **fields: str) -> httpx.Response:
    return await client.post("adapters", data=fields, files=parts(folder))


def tar_of(folder: Path, prefix: str = "", **extra: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            archive.add(folder / name, prefix + name)
        for name, data in extra.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def zip_of(folder: Path, prefix: str = "") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            archive.write(folder / name, prefix + name)
        archive.writestr("README.md", "x" * 100)
    return file.getvalue()


async def test_the_first_version_is_prod_and_the_next_is_not(
    plane: Plane, base: str, folder: Path, tmp_path: Path
):
    acme = await plane.tenant("acme")
    answer = await push(acme, folder, name="bot")
    assert answer.status_code == 201, answer.text
    made = answer.json()
    digest = content_digest(AdapterFiles.in_folder(folder))
    assert (made["version"], made["state"], made["model"]) == (1, "proving", "tiny")
    assert (made["digest"], made["aliases"], made["max_rank"]) == (digest, [], 4)
    await prove_all(plane.database)
    assert plane.files() == {digest}
    stored = plane.store / "adapters" / digest
    assert (stored / WEIGHTS_NAME).read_bytes() == (folder / WEIGHTS_NAME).read_bytes()
    listed = read_module_list(stored)
    assert listed is not None and len(listed) == 2 * len(PROJECTIONS)

    write_adapter(tmp_path / "next", seed=1)
    answer = await push(acme, tmp_path / "next", name="bot", model="tiny", alias="staging")
    assert (answer.json()["version"], answer.json()["wanted_alias"]) == (2, "staging")
    await prove_all(plane.database)
    promoted = await acme.put("adapters/bot/aliases/prod", json={"version": 2})
    assert promoted.json()["version"] == 2
    assert [m["version"] for m in promoted.json()["history"]] == [2, 1]
    shown = (await acme.get("adapters/bot")).json()
    (listed,) = (await acme.get("adapters")).json()["data"]
    assert (shown["object"], listed["object"]) == ("adapter", "adapter.summary")
    assert shown["aliases"] == listed["aliases"] == {"prod": 2, "staging": 2}
    assert [v["version"] for v in shown["versions"]] == [1, 2]


async def test_anothers_bytes_go_through_states_of_their_own(plane: Plane, base: str, folder: Path):
    """No field of an upload tells that another tenant has uploaded the same."""
    acme, globex = await plane.tenant("acme"), await plane.tenant("globex")
    await push(acme, folder, name="bot")
    await prove_all(plane.database, worker="worker-of-acme")
    digest = (await acme.get("adapters/bot/versions/1")).json()["digest"]
    async with plane.database.transaction() as connection:
        await connection.execute(
            "INSERT INTO adapter_faults (digest, worker, code, message, since)"
            " VALUES ($1, 'worker-of-acme', 'x', 'x', now() - interval '1 hour')",
            digest,
        )
    first = await push(globex, folder, name="bot")
    write_adapter(folder, seed=1)
    fresh = await push(globex, folder, name="fresh")
    assert (first.status_code, fresh.status_code) == (201, 201)
    differs = {"name", "digest", "created_at"}
    told = [{k: v for k, v in a.json().items() if k not in differs} for a in (first, fresh)]
    assert told[0] == told[1]
    assert (told[0]["state"], told[0]["proofs"], told[0]["faults"]) == ("proving", [], [])
    await prove_all(plane.database, worker="worker-of-globex")
    shown = (await globex.get("adapters/bot/versions/1")).json()
    assert (shown["state"], shown["faults"]) == ("ready", [])
    (proof,) = shown["proofs"]
    assert proof["worker"] == "worker-of-globex" and proof["proved_at"] > shown["created_at"]
    (proof,) = (await acme.get("adapters/bot/versions/1")).json()["proofs"]
    assert proof["worker"] == "worker-of-acme"


async def test_refused_uploads_leave_no_adapter_beside_the_quota(
    plane: Plane, base: str, folder: Path
):
    acme = await plane.tenant("acme")
    await plane.client.put("tenants/acme/quota", json={"adapters": 1})
    good = parts(folder)
    (folder / CONFIG_NAME).write_text('{"peft_type": "IA3"}')
    for number in range(MAX_REJECTED + 2):
        problem(await push(acme, folder, name=f"bot{number}"), 400)
    assert (await acme.get("adapters")).json()["data"] == []
    kept = (await acme.get("uploads/rejected")).json()["data"]
    assert len(kept) == MAX_REJECTED and kept[0]["name"] == f"bot{MAX_REJECTED + 1}"
    async with plane.database.transaction() as connection:
        for table in ("adapters", "adapter_versions"):
            assert await connection.fetchval(f"SELECT count(*) FROM {table}") == 0
    made = await acme.post("adapters", data={"name": "bot0"}, files=good)
    assert (made.status_code, made.json()["version"]) == (201, 1)


async def test_a_version_tells_what_the_store_has_of_it(plane: Plane, base: str, folder: Path):
    acme = await plane.tenant("acme")
    digest = (await push(acme, folder, name="bot")).json()["digest"]
    stored = plane.store / "adapters" / digest
    weights = stored / WEIGHTS_NAME
    whole = weights.read_bytes()

    async def shown(data: bytes | None = None, **params: bool) -> str:
        if data is not None:
            weights.chmod(0o600)
            weights.write_bytes(data)
        answer = await acme.get("adapters/bot/versions/1", params=params)
        return answer.json()["stored"]["state"]

    assert (await shown(), await shown(verify=True)) == ("present", "intact")
    assert await shown(whole[:-1] + bytes([whole[-1] ^ 1]), verify=True) == "damaged"
    assert await shown(whole[:-1]) == "damaged"
    assert await shown(whole, verify=True) == "intact"
    weights.unlink()
    assert await shown() == "missing"
    stored.rename(stored.with_suffix(".gone"))
    assert (await shown(), await shown(verify=True)) == ("missing", "missing")


async def test_the_same_content_again_is_the_same_version(plane: Plane, base: str, folder: Path):
    acme = await plane.tenant("acme")
    first = await push(acme, folder, name="bot")
    again = await push(acme, folder, name="bot")
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()


@pytest.mark.parametrize("prefix", ["", "run/checkpoint-60/", "../../../tmp/", "/etc/"])
@pytest.mark.parametrize("kind", ["tar", "zip"])
async def test_one_archive_will_do_whatever_its_paths(
    plane: Plane, base: str, folder: Path, kind: str, prefix: str
):
    acme = await plane.tenant("acme")
    data = tar_of(folder, prefix) if kind == "tar" else zip_of(folder, prefix)
    files = {"file": (f"adapter.{kind}", data)}
    answer = await acme.post("adapters", data={"name": "bot"}, files=files)
    assert answer.status_code == 201, answer.text
    assert plane.files() == {content_digest(AdapterFiles.in_folder(folder))}


async def test_a_rejected_upload_leaves_a_row_and_nothing_else(
    plane: Plane, base: str, folder: Path
):
    acme = await plane.tenant("acme")
    (folder / CONFIG_NAME).write_text('{"peft_type": "IA3"}')
    refused = problem(await push(acme, folder, name="bot"), 400)
    assert {"code", "field", "got", "allowed", "hint"} <= refused.keys()
    assert plane.files() == set()
    (rejected,) = (await acme.get("uploads/rejected")).json()["data"]
    assert (rejected["name"], rejected["error"]["code"]) == ("bot", refused["code"])
    problem(await acme.get("adapters/bot"), 404)
    assert (await acme.get("adapters")).json()["data"] == []
    globex = await plane.tenant("globex")
    assert (await globex.get("uploads/rejected")).json()["data"] == []
    write_adapter(folder)
    assert (await push(acme, folder, name="bot")).json()["version"] == 1


async def test_a_pickle_is_refused_by_name(plane: Plane, base: str, folder: Path):
    acme = await plane.tenant("acme")
    config = (CONFIG_NAME, (folder / CONFIG_NAME).read_bytes())
    files = [("f", config), ("f", ("adapter_model.bin", b"\x80\x04."))]
    answer = await acme.post("adapters", data={"name": "bot"}, files=files)
    assert problem(answer, 400)["code"] == "adapter.unsupported.pickle"
    assert plane.files() == set()


async def test_a_missing_file_is_named(plane: Plane, base: str, folder: Path):
    acme = await plane.tenant("acme")
    files = {WEIGHTS_NAME: parts(folder)[WEIGHTS_NAME]}
    answer = await acme.post("adapters", data={"name": "bot"}, files=files)
    assert problem(answer, 400)["param"] == CONFIG_NAME


async def test_names_that_cannot_be(plane: Plane, base: str, folder: Path):
    acme = await plane.tenant("acme")
    assert problem(await push(acme, folder, name="tiny"), 409)["code"] == "already_exists"
    for name in ("a/b", "a@b", ".."):
        refused = problem(await push(acme, folder, name=name), 400)
        assert "name" in refused["message"] and "constraint" not in refused["message"]
    assert problem(await acme.post("adapters", files=parts(folder)), 400)["param"] == "name"
    assert problem(await push(acme, folder, name="bot", model="none"), 404)["param"] == "model"
    refused = problem(await push(acme, folder, name="bot", alias="7"), 400)
    assert refused["message"].startswith("an alias is 1 to 64 letters, digits")
    assert (await acme.get("adapters")).json()["data"] == []
    assert plane.files() == set()


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"name": "bot", "alias": "7"}, 400, "alias"),
        ({"name": "a/b"}, 400, "name"),
        ({"name": "tiny"}, 409, "name"),
        ({"name": "bot", "model": "none"}, 404, "model"),
        ({"name": "bot", "tenant": "globex"}, 404, "tenant"),
        ({"name": "bot", "serving": "{]"}, 400, "serving"),
    ],
)
async def test_what_the_fields_say_is_refused_before_the_files_come(
    plane: Plane, base: str, folder: Path, fields: dict[str, str], status: int, param: str
):
    acme = await plane.tenant("acme")
    request = acme.build_request("POST", "adapters", data=fields, files=parts(folder))
    body = await request.aread()
    head = b"POST /admin/v1/adapters HTTP/1.1\r\n"
    for name, value in (*request.headers.raw, (b"connection", b"close")):
        head += b"%s: %s\r\n" % (name, value)
    reader, writer = await asyncio.open_connection(request.url.host, request.url.port)
    writer.write(head + b"\r\n" + body[: len(body) // 2])
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    refused, _, error = answer.partition(b"\r\n\r\n")
    assert refused.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(error)["error"]["param"] == param
    assert plane.files() == set()


async def test_fields_may_come_behind_the_files(plane: Plane, base: str, folder: Path):
    await plane.tenant("acme")
    fields = {name: (None, value) for name, value in {"name": "bot", "tenant": "acme"}.items()}
    answer = await plane.client.post("adapters", files={**parts(folder), **fields})
    assert answer.status_code == 201, answer.text


async def test_two_bases_of_one_shape_are_ambiguous(plane: Plane, base: str, folder: Path):
    write_model(plane.store, "d" * 64)
    await plane.client.post("models", json={"name": "twin", "digest": "d" * 64})
    acme = await plane.tenant("acme")
    refused = problem(await push(acme, folder, name="bot"), 400)
    assert refused["code"] == "adapter.base.ambiguous"
    assert (await push(acme, folder, name="bot", model="twin")).json()["model"] == "twin"


async def test_an_adapter_belongs_to_its_tenant(plane: Plane, base: str, folder: Path):
    acme, globex = await plane.tenant("acme"), await plane.tenant("globex")
    await push(acme, folder, name="bot")
    problem(await push(globex, folder, name="bot", tenant="acme"), 404)
    answer = await push(plane.client, folder, name="bot", tenant="globex")
    assert answer.status_code == 201
    digest = answer.json()["digest"]
    assert (await acme.delete("adapters/bot")).status_code == 200
    assert plane.files() == {digest}
    assert (await plane.client.delete("tenants/globex")).status_code == 200
    assert plane.files() == set()


async def test_concurrent_uploads_of_one_content_make_one_version(
    plane: Plane, base: str, folder: Path
):
    acme = await plane.tenant("acme")
    answers = await asyncio.gather(*(push(acme, folder, name="bot") for _ in range(6)))
    assert sorted(a.status_code for a in answers) == [200] * 5 + [201]
    assert {a.json()["version"] for a in answers} == {1}
    assert len(plane.files()) == 1


async def test_uploads_are_bounded(plane: Plane, base: str, folder: Path):
    acme = await plane.tenant("acme")
    large = {"file": (WEIGHTS_NAME, bytes(3 * MAX_UPLOAD_BYTES))}
    answer = await acme.post("adapters", data={"name": "bot"}, files=large)
    assert problem(answer, 413)["code"] == "request_too_large"
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(WEIGHTS_NAME, bytes(3 * MAX_UPLOAD_BYTES))
    files = {"file": ("a.zip", bomb.getvalue())}
    problem(await acme.post("adapters", data={"name": "bot"}, files=files), 413)
    # Each part may be as large as the whole, and all of them no larger.
    half = bytes(3 * MAX_UPLOAD_BYTES // 2)
    two = {"a": (WEIGHTS_NAME, half), "b": (CONFIG_NAME, half)}
    problem(await acme.post("adapters", data={"name": "bot"}, files=two), 413)
    many = [("file", ("x.tar", b"")) for _ in range(20)]
    twice = await acme.post("adapters", data={"name": "bot"}, files=many)
    assert problem(twice, 400)["code"] == "duplicate_part"
    long = await acme.post("adapters", data={"name": "b" * 5000}, files=parts(folder))
    assert problem(long, 400)["param"] == "name"
    assert plane.files() == set()


@pytest.mark.parametrize("as_archive", [False, True])
async def test_what_came_must_have_the_given_sha256(
    plane: Plane, base: str, folder: Path, as_archive: bool
):
    acme = await plane.tenant("acme")
    archive = {"file": ("adapter.tar", tar_of(folder))}
    files: dict[str, Any] = archive if as_archive else parts(folder)
    checked = files["file" if as_archive else WEIGHTS_NAME][1]
    for wrong in ("0" * 64, "no digest", hashlib.sha256(b"").hexdigest()):
        fields = {"name": "bot", "sha256": wrong}
        refused = problem(await acme.post("adapters", data=fields, files=files), 400)
        assert (refused["code"], refused["param"]) == ("adapter.upload.sha256", "sha256")
    assert plane.files() == set()
    assert (await acme.get("adapters")).json()["data"] == []
    for right in (hashlib.sha256(checked).hexdigest(), hashlib.sha256(checked).hexdigest().upper()):
        answer = await acme.post("adapters", data={"name": "bot", "sha256": right}, files=files)
        assert answer.is_success, answer.text


async def test_an_upload_that_is_cut_leaves_nothing(plane: Plane, base: str, folder: Path):
    acme = await plane.tenant("acme")
    request = acme.build_request("POST", "adapters", data={"name": "b"}, files=parts(folder))
    body = await request.aread()

    async def half():
        yield body[: len(body) // 2]
        raise ConnectionError

    headers = {"content-type": request.headers["content-type"]}
    with pytest.raises(ConnectionError):
        await acme.post("adapters", content=half(), headers=headers)
    cut = await acme.post("adapters", content=body[: len(body) // 2], headers=headers)
    assert problem(cut, 400)["code"] == "multipart"
    # The first began before; whether it had a folder by then is open.
    async with asyncio.timeout(60):
        while list((plane.store / "incoming").iterdir()):
            await asyncio.sleep(0.02)
    assert plane.files() == set()
    assert (await acme.get("adapters")).json()["data"] == []


async def test_so_many_forms_are_under_way_at_once(
    plane: Plane, base: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of one tenant, and of all: the next is refused before its bytes are read."""
    acme, globex = await plane.tenant("acme"), await plane.tenant("globex")
    request = acme.build_request("POST", "adapters", data={"name": "bot"}, files=parts(folder))
    body, headers = await request.aread(), {"content-type": request.headers["content-type"]}
    monkeypatch.setattr(upload, "WAIT_S", 0.1)
    go_on = asyncio.Event()
    sent: list[asyncio.Task[httpx.Response]] = []

    async def slowly():
        yield body[: len(body) // 2]
        await go_on.wait()
        yield body[len(body) // 2 :]

    async def begin(client: httpx.AsyncClient, num_forms: int) -> None:
        for _ in range(num_forms):
            posting = client.post("adapters", content=slowly(), headers=headers)
            sent.append(asyncio.create_task(posting))
        async with asyncio.timeout(60):
            while len(list((plane.store / "incoming").glob(f"*/{WEIGHTS_NAME}"))) < len(sent):
                await asyncio.sleep(0.02)

    await begin(acme, MAX_FORMS_OF_TENANT)
    refused = await push(acme, folder, name="bot")
    assert problem(refused, 429)["code"] == "too_many_uploads"
    assert refused.headers["retry-after"] == "1"
    assert (await push(globex, folder, name="bot")).status_code == 201

    # An admin's are nobody's own, and count among all.
    await begin(plane.client, MAX_FORMS - MAX_FORMS_OF_TENANT)
    refused = await push(globex, folder, name="bot")
    assert problem(refused, 503)["code"] == "too_many_uploads"
    assert refused.headers["retry-after"] == "1"
    assert len(list((plane.store / "incoming").iterdir())) == MAX_FORMS

    go_on.set()
    statuses = [answer.status_code for answer in await asyncio.gather(*sent)]
    assert sorted(statuses[:MAX_FORMS_OF_TENANT]) == [200] * (MAX_FORMS_OF_TENANT - 1) + [201]
    # An admin must say whose.
    assert set(statuses[MAX_FORMS_OF_TENANT:]) == {400}
    assert (await push(acme, folder, name="bot")).status_code == 200
    assert len(plane.files()) == 1


def damaged_archives(folder: Path) -> dict[str, bytes]:
    tar = tar_of(folder)
    gz = io.BytesIO()
    with tarfile.open(fileobj=gz, mode="w:gz") as archive:
        archive.add(folder / CONFIG_NAME, CONFIG_NAME)
    twice = io.BytesIO()
    with tarfile.open(fileobj=twice, mode="w") as archive:
        for name in (CONFIG_NAME, WEIGHTS_NAME, CONFIG_NAME):
            archive.add(folder / name, name)
    link = tarfile.TarInfo(WEIGHTS_NAME)
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    linked = io.BytesIO()
    with tarfile.open(fileobj=linked, mode="w") as archive:
        archive.addfile(link)
    zipped = zip_of(folder)
    symlink = io.BytesIO()
    with zipfile.ZipFile(symlink, "w") as archive:
        member = zipfile.ZipInfo(WEIGHTS_NAME)
        member.external_attr = 0o120777 << 16
        archive.writestr(member, "/etc/passwd")
    crowd = io.BytesIO()
    with zipfile.ZipFile(crowd, "w") as archive:
        for i in range(2000):
            archive.writestr(f"{i}", "")
    return {
        "empty": b"",
        "text": b"hello",
        "gzip": gz.getvalue(),
        "tar cut": tar[:2000],
        "tar damaged": tar[:10] + b"!" + tar[11:],
        "tar twice": twice.getvalue(),
        "tar link": linked.getvalue(),
        "zip cut": zipped[:2000],
        "zip damaged": zipped[:100] + bytes(100) + zipped[200:],
        "zip link": symlink.getvalue(),
        "zip crowd": crowd.getvalue(),
    }


async def test_damaged_archives_are_refused(plane: Plane, base: str, folder: Path):
    acme = await plane.tenant("acme")
    archives = damaged_archives(folder)
    for kind, data in archives.items():
        files = {"file": ("adapter.zip" if "zip" in kind else "adapter.tar", data)}
        answer = await acme.post("adapters", data={"name": "bot"}, files=files)
        assert problem(answer, 400)["type"] == "invalid_request_error", kind
    assert plane.files() == set()
    assert (await acme.get("adapters")).json()["data"] == []
