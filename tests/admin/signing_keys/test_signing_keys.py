"""Signed adapters over real HTTP and Postgres: who may register keys, what a signature is of, what
is refused, and what the audit log says."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from adapters.format.signature import (
    KeyRefused,
    read_private_key,
    read_public_key,
    sign,
    sign_upload,
)
from adapters.format.validator import AdapterFiles, content_digest
from admin.signing_keys.signing_keys import MAX_KEYS
from store.queries import load_catalog
from tests.adapters.files import write_adapter
from tests.admin.conftest import Plane
from tests.admin.http.test_routes import problem
from tests.admin.lifecycle import prove_all
from tests.admin.uploads.test_upload import parts, push


def public_pem(key: Ed25519PrivateKey | X25519PrivateKey) -> str:
    encoded = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return encoded.decode()


def signature(key: Ed25519PrivateKey, folder: Path) -> str:
    return base64.b64encode(sign(key, content_digest(AdapterFiles.in_folder(folder)))).decode()


def signed(key: Ed25519PrivateKey, folder: Path, **fields: Any) -> dict[str, str]:
    """Both signatures of an upload with these fields."""
    digest = content_digest(AdapterFiles.in_folder(folder))
    whole = base64.b64encode(sign_upload(key, digest, fields)).decode()
    return {"signature": signature(key, folder), "upload_signature": whole}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
async def acme(plane: Plane, base: str) -> httpx.AsyncClient:
    return await plane.tenant("acme")


async def register(client: httpx.AsyncClient, key: Ed25519PrivateKey, name: str = "ci") -> str:
    made = await client.post("signing-keys", json={"name": name, "public_key": public_pem(key)})
    assert made.status_code == 201, made.text
    return made.json()["id"]


async def actions(plane: Plane, object_id: str) -> list[str]:
    found = await plane.client.get("audit", params={"object": object_id})
    return [entry["action"] for entry in found.json()["data"]]


async def test_a_signed_version_names_its_key(
    plane: Plane, acme: httpx.AsyncClient, folder: Path
) -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    key_id = await register(acme, key)
    await register(acme, other, "laptop")
    made = await push(acme, folder, name="bot", signature=signature(key, folder))
    assert made.status_code == 201, made.text
    assert made.json()["signed_by"] == key_id
    listed = (await acme.get("signing-keys")).json()["data"]
    assert {each["name"]: each["versions"] for each in listed} == {"ci": 1, "laptop": 0}
    await prove_all(plane.database)
    async with plane.database.acquire() as connection:
        (version,) = (await load_catalog(connection)).versions
    assert version.public_key == key.public_key().public_bytes_raw()
    assert base64.b64encode(version.signature or b"").decode() == signature(key, folder)
    entries = (await plane.client.get("audit", params={"object": "bot@1"})).json()["data"]
    created = [entry for entry in entries if entry["action"] == "version.create"]
    assert [entry["details"]["signed_by"] for entry in created] == [key_id]
    # The same content, pushed by another holder of a key.
    again = await push(acme, folder, name="bot", signature=signature(other, folder))
    assert again.status_code == 200 and again.json()["signed_by"] != key_id


async def test_what_is_no_signature_of_the_content_is_refused(
    plane: Plane, acme: httpx.AsyncClient, folder: Path, tmp_path: Path
) -> None:
    key, stranger = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    await register(acme, key)
    globex = await plane.tenant("globex")
    await register(globex, stranger)
    write_adapter(tmp_path / "changed", seed=1)
    for wrong in (
        signature(key, tmp_path / "changed"),
        signature(stranger, folder),
        base64.b64encode(bytes(64)).decode(),
        base64.b64encode(bytes(63)).decode(),
        "%%%",
    ):
        refused = problem(await push(acme, folder, name="bot", signature=wrong), 400)
        assert refused["code"] == "signature_invalid" and refused["param"] == "signature"
    assert plane.files() == set()
    assert (await acme.get("adapters")).json()["data"] == []


async def test_a_tenant_that_requires_signatures(
    plane: Plane, acme: httpx.AsyncClient, folder: Path, tmp_path: Path
) -> None:
    """Neither an upload nor a load without one, and a stolen API key cannot sign."""
    key = Ed25519PrivateKey.generate()
    await register(acme, key)
    changed = await plane.client.patch("tenants/acme", json={"require_signature": True})
    assert changed.status_code == 200 and changed.json()["require_signature"]
    refused = problem(await push(acme, folder, name="bot"), 403)
    assert refused["code"] == "signature_required" and "--sign" in refused["message"]
    url = plane.url.removesuffix("/admin/v1")
    load, form = f"{url}/v1/load_lora_adapter", {"lora_name": "bot"}
    loaded = await acme.post(load, data=form, files=parts(folder))
    assert loaded.status_code == 403 and "signed" in loaded.text
    assert plane.files() == set()
    new = {"name": "thief", "public_key": public_pem(Ed25519PrivateKey.generate())}
    assert problem(await acme.post("signing-keys", json=new), 403)
    assert (
        await plane.client.post("signing-keys", json=new, params={"tenant": "acme"})
    ).status_code == 201
    files_only = await push(acme, folder, name="bot", signature=signature(key, folder))
    refused = problem(files_only, 403)
    assert refused["code"] == "signature_required" and "files only" in refused["message"]
    assert (await push(acme, folder, name="bot", **signed(key, folder, name="bot"))).is_success
    await plane.client.patch("tenants/acme", json={"require_signature": False})
    write_adapter(tmp_path / "second", seed=2)
    assert (await push(acme, tmp_path / "second", name="bot")).is_success


async def test_a_signature_covers_name_base_and_serving_data(
    plane: Plane, acme: httpx.AsyncClient, folder: Path
) -> None:
    """A signature of one upload cannot be used for another one of the same files."""
    key = Ed25519PrivateKey.generate()
    model = (await plane.client.get("models")).json()["data"][0]["name"]
    await register(acme, key)
    serving = {"stop": ["\u00e9"], "defaults": {"top_p": 0.5, "temperature": 1}}
    text = json.dumps(serving, indent=1)
    whole = signed(key, folder, name="bot", serving=serving)
    folder_serving, tokens = {"stop_token_ids": [3]}, {"end": "<x>"}
    for fields in (
        {"name": "other", "serving": text},
        {"name": "bot"},
        {"name": "bot", "serving": json.dumps(serving | {"stop": []})},
        {"name": "bot", "serving": text, "folder_serving": json.dumps(folder_serving)},
        {"name": "bot", "serving": text, "folder_tokens": json.dumps(tokens)},
        {"name": "bot", "serving": text, "model": model},
    ):
        refused = problem(await push(acme, folder, **fields, **whole), 400)
        assert (refused["code"], refused["param"]) == ("signature_invalid", "upload_signature")
    made = await push(acme, folder, name="bot", serving=text, **whole)
    assert made.status_code == 201 and not any("signature" in w for w in made.json()["warnings"])


async def test_a_signature_of_the_files_alone_says_so(
    acme: httpx.AsyncClient, folder: Path
) -> None:
    key = Ed25519PrivateKey.generate()
    await register(acme, key)
    made = (await push(acme, folder, name="bot", signature=signature(key, folder))).json()
    assert made["warnings"][-1].startswith("the signature covers the files only")


async def test_no_alias_is_moved_to_a_version_without_a_required_signature(
    plane: Plane, acme: httpx.AsyncClient, folder: Path, tmp_path: Path
) -> None:
    """Neither by promotion, canary or rollback, nor when an earlier upload becomes ready."""
    key = Ed25519PrivateKey.generate()
    await register(acme, key)
    for seed in (1, 2):
        write_adapter(tmp_path / f"{seed}", seed=seed)
        assert (await push(acme, tmp_path / f"{seed}", name="bot")).status_code == 201
    await prove_all(plane.database)
    prod = "adapters/bot/aliases/prod"
    assert (await acme.put(prod, json={"version": 2})).is_success
    assert (await push(acme, folder, name="bot", **signed(key, folder, name="bot"))).is_success
    await prove_all(plane.database)
    write_adapter(tmp_path / "late", seed=7)
    late = {"name": "late", "alias": "next"}
    assert (await push(acme, tmp_path / "late", **late)).status_code == 201
    await plane.client.patch("tenants/acme", json={"require_signature": True})
    await prove_all(plane.database)
    shown = (await acme.get("adapters/late/versions/1")).json()
    assert (shown["state"], shown["aliases"]) == ("ready", [])
    assert (await acme.put(prod, json={"version": 3})).is_success
    canary = {"canary": {"3": 90, "1": 10}}
    for move in (
        acme.put(prod, json={"version": 1}),
        acme.put("adapters/bot/aliases/new", json={"version": 2}),
        acme.put(prod, json=canary),
        acme.post(f"{prod}/rollback"),
        acme.put("adapters/late/aliases/prod", json={"version": 1}),
    ):
        refused = problem(await move, 409)
        assert refused["code"] == "version_not_signed" and "--sign" in refused["message"]
    assert (
        await push(acme, tmp_path / "1", name="bot", **signed(key, tmp_path / "1", name="bot"))
    ).status_code == 200
    assert (await acme.put(prod, json={"version": 1})).is_success


async def test_revoking_a_key_marks_its_versions(
    plane: Plane, acme: httpx.AsyncClient, folder: Path, tmp_path: Path
) -> None:
    key = Ed25519PrivateKey.generate()
    key_id = await register(acme, key)
    await push(acme, folder, name="bot", signature=signature(key, folder))
    await prove_all(plane.database)
    gone = await acme.delete(f"signing-keys/{key_id}")
    assert gone.status_code == 200 and gone.json()["revoked_at"] is not None
    shown = (await acme.get("adapters/bot/versions/1")).json()
    assert shown["signing_key_revoked_at"] == gone.json()["revoked_at"]
    assert shown["state"] == "ready", "it stays served"
    write_adapter(tmp_path / "second", seed=2)
    second = signature(key, tmp_path / "second")
    refused = problem(await push(acme, tmp_path / "second", name="bot", signature=second), 400)
    assert refused["code"] == "signing_key_revoked" and "'ci'" in refused["message"]
    assert sorted(await actions(plane, key_id)) == ["signing_key.create", "signing_key.revoke"]
    again = await acme.delete(f"signing-keys/{key_id}")
    assert again.json()["revoked_at"] == gone.json()["revoked_at"]
    taken = await acme.post("signing-keys", json={"name": "b", "public_key": public_pem(key)})
    assert problem(taken, 409)


async def test_keys_that_are_none(plane: Plane, acme: httpx.AsyncClient) -> None:
    private = Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    for text in (
        "hello",
        private.decode(),
        public_pem(X25519PrivateKey.generate()),
        "ssh-rsa AAAA",
    ):
        answer = await acme.post("signing-keys", json={"name": "ci", "public_key": text})
        refused = problem(answer, 400)
        assert refused["code"] == "invalid_public_key" and private.decode() not in answer.text
    for number in range(MAX_KEYS):
        await register(acme, Ed25519PrivateKey.generate(), f"k{number}")
    new = {"name": "more", "public_key": public_pem(Ed25519PrivateKey.generate())}
    assert (
        problem(await acme.post("signing-keys", json=new), 409)["code"] == "too_many_signing_keys"
    )


@pytest.mark.parametrize("form", [PrivateFormat.PKCS8, PrivateFormat.OpenSSH])
def test_private_keys_in_both_forms(form: PrivateFormat) -> None:
    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(Encoding.PEM, form, NoEncryption())
    assert read_private_key(text).private_bytes_raw() == key.private_bytes_raw()
    openssh = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    raw = key.public_key().public_bytes_raw()
    assert read_public_key(public_pem(key)) == read_public_key(f"{openssh} me@box\n") == raw
    with pytest.raises(KeyRefused, match="PEM"):
        read_private_key(b"hello")


def test_a_key_with_a_passphrase_is_refused() -> None:
    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word"))
    with pytest.raises(KeyRefused, match="passphrase"):
        read_private_key(text)
