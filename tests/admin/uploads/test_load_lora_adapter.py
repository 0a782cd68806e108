"""vLLM's load and unload routes over real HTTP: bodies, answers, refusals, and what is kept."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from litestar import Litestar

from adapters.format.validator import CONFIG_NAME, WEIGHTS_NAME
from admin.adapters.ephemeral import Retention
from admin.uploads.archive import StagingFolder
from admin.uploads.opened_folders import OpenedFolders
from store.errors import Invalid
from tests.adapters.files import write_adapter
from tests.admin.conftest import MAX_UPLOAD_BYTES, Plane
from tests.admin.http.test_routes import problem
from tests.admin.lifecycle import prove_all
from tests.admin.uploads.test_upload import parts, push, tar_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Opened to the tenant acme; has the adapters step-1 and step-2."""
    root = tmp_path / "checkpoints"
    for number in (1, 2):
        write_adapter(root / f"step-{number}", seed=number)
    return root


@pytest.fixture
async def acme(plane: Plane, app: Litestar, base: str, root: Path) -> httpx.AsyncClient:
    configure(app, adapter_roots={"acme": root}, retention=Retention(2, 3600))
    return await plane.tenant("acme")


def configure(app: Litestar, **settings: Any) -> None:
    app.state.admin.config = msgspec.structs.replace(app.state.admin.config, **settings)


async def load(client: httpx.AsyncClient, name: str, path: object, **fields: object) -> Any:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return await client.post(route(client, "load"), json=body)


async def load_form(client: httpx.AsyncClient, files: Any, **fields: str) -> httpx.Response:
    return await client.post(route(client, "load"), data=fields, files=files)


async def unload(client: httpx.AsyncClient, name: str, **fields: object) -> httpx.Response:
    return await client.post(route(client, "unload"), json={"lora_name": name, **fields})


def route(client: httpx.AsyncClient, verb: str) -> str:
    return str(client.base_url.join(f"/v1/{verb}_lora_adapter"))


def refused(answer: httpx.Response, status: int, reason: str) -> Mapping[str, Any]:
    """The error of a refusal, shaped as vLLM's."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["reason"]) == (status, reason), error
    assert {"message", "type", "param"} <= error.keys()
    return error


async def versions(client: httpx.AsyncClient, name: str) -> dict[int, str]:
    """State by number."""
    found = await client.get(f"adapters/{name}/versions")
    return {version["version"]: version["state"] for version in found.json()["data"]}


async def test_a_path_is_loaded_replaced_in_place_and_unloaded_as_by_vllm(
    plane: Plane, acme: httpx.AsyncClient, root: Path
):
    answer = await load(acme, "policy", root / "step-1")
    assert answer.status_code == 200
    assert answer.text == "Success: LoRA adapter 'policy' added successfully."
    assert answer.headers["loraplex-effect-proof"] == "skipped"
    assert answer.headers["loraplex-adapter-version"] == "1"
    stages = answer.headers["server-timing"].split(", ")
    assert [stage.partition(";")[0] for stage in stages] == ["receive", "check", "publish"]

    again = refused(await load(acme, "policy", root / "step-2"), 400, "adapter_already_loaded")
    assert again["type"] == "InvalidUserInput"
    assert again["message"] == (
        "The lora adapter 'policy' has already been loaded. If you want to load the adapter in"
        " place, set 'load_inplace' to True."
    )
    replaced = await load(acme, "policy", root / "step-2", load_inplace=True)
    assert replaced.status_code == 200, replaced.text
    shown = (await acme.get("adapters/policy/versions/2")).json()
    assert (shown["state"], shown["effect_proof"], shown["proofs"]) == ("ready", "skipped", [])
    assert shown["expires_at"] is not None and shown["aliases"] == []

    gone = await unload(acme, "policy", lora_int_id=7)
    assert gone.status_code == 200
    assert gone.text == "Success: LoRA adapter 'policy' removed successfully."
    assert plane.files() == set()
    missing = refused(await unload(acme, "policy"), 404, "adapter_not_found")
    assert missing["type"] == "NotFoundError"
    assert missing["message"] == "The lora adapter 'policy' cannot be found."


async def test_files_come_in_the_body(plane: Plane, acme: httpx.AsyncClient, root: Path):
    answer = await load_form(acme, parts(root / "step-1"), lora_name="policy")
    assert answer.status_code == 200, answer.text
    archive = {"file": ("adapter.tar", tar_of(root / "step-2"))}
    again = await load_form(acme, archive, lora_name="policy", load_inplace="true", model="tiny")
    assert again.status_code == 200, again.text
    assert await versions(acme, "policy") == {1: "ready", 2: "ready"}
    large = {WEIGHTS_NAME: (WEIGHTS_NAME, bytes(MAX_UPLOAD_BYTES + (1 << 20) + 1))}
    refused(await load_form(acme, large, lora_name="other"), 413, "request_too_large")
    wrong = await load_form(acme, parts(root / "step-1"), lora_name="x", load_inplace="maybe")
    assert refused(wrong, 400, "invalid")["param"] == "load_inplace"
    assert len(plane.files()) == 2


async def test_the_newest_versions_are_kept_for_a_time(
    plane: Plane, app: Litestar, acme: httpx.AsyncClient, root: Path
):
    for _ in range(3):
        await load(acme, "policy", root / "step-1", load_inplace=True)
        await load(acme, "policy", root / "step-2", load_inplace=True)
    await app.state.admin.reaper.reap()
    assert await versions(acme, "policy") == {5: "ready", 6: "ready"}
    assert len(plane.files()) == 2
    async with plane.database.transaction() as connection:
        await connection.execute(
            "UPDATE adapter_versions SET expires_at = now() - interval '1 s' WHERE version = 5"
        )
    for _ in range(2):
        await app.state.admin.reaper.reap()
    assert await versions(acme, "policy") == {6: "ready"}
    assert len(plane.files()) == 1


async def test_a_promoted_name_is_never_taken_by_a_load(
    plane: Plane, acme: httpx.AsyncClient, root: Path
):
    await load(acme, "policy", root / "step-1")
    pushed = await push(acme, root / "step-1", name="policy")
    assert (pushed.status_code, pushed.json()["version"]) == (201, 2)
    ephemeral = await acme.put("adapters/policy/aliases/staging", json={"version": 1})
    assert problem(ephemeral, 409)["code"] == "version_ephemeral"
    await prove_all(plane.database)
    assert (await acme.get("adapters/policy")).json()["aliases"] == {"prod": 2}
    again = await load(acme, "policy", root / "step-2", load_inplace=True)
    refused(again, 409, "name_promoted")
    assert (await unload(acme, "policy")).status_code == 200
    assert await versions(acme, "policy") == {2: "ready"}


async def test_ephemeral_versions_count_in_the_quota(
    plane: Plane, acme: httpx.AsyncClient, root: Path
):
    await plane.client.put("tenants/acme/quota", json={"adapters": 1})
    assert (await load(acme, "policy", root / "step-1")).status_code == 200
    error = refused(await load(acme, "other", root / "step-2"), 409, "adapter_quota_exceeded")
    assert error["limit"] == "adapters"
    assert await versions(acme, "policy") == {1: "ready"}


async def test_a_load_is_audited(plane: Plane, acme: httpx.AsyncClient, root: Path):
    await load(acme, "policy", root / "step-1")
    await unload(acme, "policy")
    entries = (await plane.client.get("audit")).json()["data"]
    actions = [entry["action"] for entry in entries if entry["object"] == "policy@1"]
    assert {"version.create", "version.retired"} <= set(actions)


async def test_who_may_load(plane: Plane, acme: httpx.AsyncClient, root: Path):
    infers = (await plane.key("acme", scopes=["inference"]))["key"]
    client = plane.bearing(str(infers))
    refused(await load(client, "policy", root / "step-1"), 403, "insufficient_scope")
    refused(await unload(client, "policy"), 403, "insufficient_scope")
    refused(await load(plane.client, "policy", root / "step-1"), 400, "tenant_missing")
    body = {"lora_name": "admins", "lora_path": str(root / "step-1")}
    by_admin = await plane.client.post(route(acme, "load"), json=body, params={"tenant": "acme"})
    assert by_admin.status_code == 200, by_admin.text
    refused(await load(plane.bearing("lpx_no"), "policy", "/"), 401, "invalid_api_key")
    await load(acme, "policy", root / "step-1")
    globex = await plane.tenant("globex")
    refused(await unload(globex, "policy"), 404, "adapter_not_found")
    refused(await load(globex, "policy", root / "step-1"), 400, "lora_path_not_allowed")


async def test_only_opened_folders_are_read(acme: httpx.AsyncClient, root: Path, tmp_path: Path):
    outside = tmp_path / "outside"
    shutil.copytree(root / "step-1", outside)
    (root / "link").symlink_to(outside)
    (root / "mixed").mkdir()
    shutil.copy(root / "step-1" / WEIGHTS_NAME, root / "mixed")
    (root / "mixed" / CONFIG_NAME).symlink_to(outside / CONFIG_NAME)
    for path in (
        *(outside, tmp_path / "not there", "/", "/etc/passwd", root / ".." / "outside"),
        *(root / "link", root / "mixed", f"{root}-other"),
    ):
        refused(await load(acme, "policy", path), 400, "lora_path_not_allowed")
    for path in ("step-1", "./step-1", "org/adapter-on-a-hub"):
        refused(await load(acme, "policy", path), 400, "lora_path_form")
    missing = refused(await load(acme, "policy", root / "step-9"), 404, "lora_path_not_found")
    assert missing["message"] == f"Loading lora policy failed: No adapter found for {root}/step-9"
    (root / "linked").mkdir()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        (root / "linked" / name).symlink_to(root / "step-1" / name)
    assert (await load(acme, "policy", root / "linked")).status_code == 200


async def test_what_is_no_plain_file_is_refused(acme: httpx.AsyncClient, root: Path):
    odd = root / "odd"
    odd.mkdir()
    os.mkfifo(odd / CONFIG_NAME)
    refused(await load(acme, "policy", odd), 400, "lora_path_unreadable")
    (odd / CONFIG_NAME).unlink()
    (odd / CONFIG_NAME).mkdir()
    refused(await load(acme, "policy", odd), 400, "lora_path_unreadable")


async def test_odd_paths_are_refused_by_name(acme: httpx.AsyncClient, root: Path):
    (root / "looped").mkdir()
    (root / "looped" / CONFIG_NAME).symlink_to(root)
    refused(await load(acme, "policy", root / "looped"), 400, "lora_path_unreadable")
    refused(await load(acme, "policy", root / ("x" * 300)), 400, "lora_path_unreadable")


async def test_a_link_replaced_while_it_is_resolved_is_refused(
    acme: httpx.AsyncClient, root: Path, monkeypatch: pytest.MonkeyPatch
):
    (root / "newest").symlink_to(root / "step-1")
    real = os.readlink

    def readlink(path: Any, **options: Any) -> str:
        # As if a folder were put in place of the link just before.
        if str(path).endswith("newest"):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, **options)

    monkeypatch.setattr(os, "readlink", readlink)
    refused(await load(acme, "policy", root / "newest"), 400, "lora_path_unreadable")


async def test_processes_are_not_told_apart_by_paths(acme: httpx.AsyncClient, root: Path):
    """Neither one that lives and leads to an opened folder, nor one that does not live."""
    answers = {
        refused(
            await load(acme, "policy", f"/proc/{pid}/root{root}/step-1"),
            *(400, "lora_path_not_allowed"),
        )["message"]
        for pid in (os.getpid(), "self", "1", "4194304")
    }
    assert len(answers) == 1


async def test_many_loads_by_path_at_once_wait_for_each_other(acme: httpx.AsyncClient, root: Path):
    answers = await asyncio.gather(
        *(load(acme, f"policy-{number}", root / "step-1") for number in range(12))
    )
    assert [answer.status_code for answer in answers] == [200] * 12


async def test_a_large_file_is_refused_before_it_is_read(acme: httpx.AsyncClient, root: Path):
    with (root / "step-1" / WEIGHTS_NAME).open("r+b") as file:
        file.truncate(MAX_UPLOAD_BYTES + 1)
    refused(await load(acme, "policy", root / "step-1"), 413, "request_too_large")


def test_a_link_put_in_place_of_a_folder_meanwhile_is_refused(root: Path, tmp_path: Path):
    folders = OpenedFolders([root])
    real, moved = root / "step-1", root / "moved"

    def swap(_num_bytes: int) -> None:
        """Called once the first file is open."""
        if not moved.exists():
            real.rename(moved)
            real.symlink_to(moved)

    staged = tmp_path / "staged"
    staged.mkdir()
    resolved = os.path.realpath

    def resolve(path: Any, **options: Any) -> str:
        # As if the link were put there right after the path was resolved.
        return str(path) if moved.exists() else resolved(path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os.path, "realpath", resolve)
        with pytest.raises(Invalid) as caught:
            folders.copy(str(real), StagingFolder(staged, MAX_UPLOAD_BYTES, swap))
    assert caught.value.code == "lora_path_unreadable"


async def test_bodies_that_are_refused(acme: httpx.AsyncClient, root: Path):
    path = root / "step-1"
    both = await load(acme, "", path)
    assert refused(both, 400, "invalid")["message"] == (
        "Both 'lora_name' and 'lora_path' must be provided."
    )
    refused(await load(acme, "policy", ""), 400, "invalid")
    refused(await load(acme, "org/policy", path), 400, "invalid")
    refused(await load(acme, "tiny", path), 409, "already_exists")
    refused(await load(acme, "policy", path, is_3d_lora_weight=True), 400, "unsupported")
    refused(await load(acme, "policy", path, model="none"), 404, "model_not_found")
    unknown = refused(await load(acme, "policy", path, base_model_name="x"), 400, "invalid")
    assert unknown["param"] == "base_model_name"
    (path / CONFIG_NAME).write_text('{"peft_type": "IA3"}')
    bad = await load(acme, "policy", path)
    assert bad.status_code == 400 and bad.json()["error"]["field"]
    assert len((await acme.get("uploads/rejected")).json()["data"]) == 1
    text = await acme.post(route(acme, "load"), content="x", headers={"content-type": "text/plain"})
    refused(text, 400, "content_type")
    assert (await acme.get("adapters")).json()["data"] == []


async def test_of_loads_at_once_under_one_name_one_is_first(acme: httpx.AsyncClient, root: Path):
    answers = await asyncio.gather(*(load(acme, "policy", root / "step-1") for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 400, 400, 400]
