"""`adapter push --sign` and `signing-key`, as commands."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from tests.adapters.files import write_adapter
from tests.admin.conftest import Plane
from tests.admin.lifecycle import prove_all
from tests.loraplex.commands.test_cli import run


@pytest.fixture
async def gateway(plane: Plane) -> AsyncIterator[None]:
    """Finds every adapter right."""

    async def prove() -> None:
        while True:
            await prove_all(plane.database)
            await asyncio.sleep(0.05)

    proving = asyncio.create_task(prove())
    yield
    proving.cancel()


def write_key(folder: Path) -> tuple[Path, Path]:
    """Returns the files of a private key and its public one, as ssh-keygen writes them."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / "release", folder / "release.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return private, public


async def test_a_signed_push(plane: Plane, base: str, gateway: None, tmp_path: Path) -> None:
    await run(plane, "tenant", "create", "acme")
    private, public = write_key(tmp_path)
    own = ("--tenant", "acme")
    made = await run(plane, "signing-key", "create", str(public), *own)
    assert made.startswith("release (sig_")
    key_id = made.strip()[len("release (") : -1]
    refused = await run(plane, "signing-key", "create", str(private), *own, code=1)
    assert "this is a private key" in refused
    required = await run(plane, "tenant", "change", "acme", "--require-signature")
    assert required == "acme requires signatures\n"
    folders = [str(tmp_path / name) for name in ("bot", "other")]
    for seed, folder in enumerate(folders):
        write_adapter(Path(folder), seed=seed)
    assert "push with --sign KEYFILE" in await run(
        plane, "adapter", "push", folders[0], *own, code=1
    )
    sign = ("--sign", str(private))
    assert (
        await run(plane, "adapter", "push", *folders, *own, *sign)
        == "bot@1 (prod)\nother@1 (prod)\n"
    )
    shown = json.loads(await run(plane, "adapter", "show", "bot@1", *own, "--json"))
    assert shown["signed_by"] == key_id
    revoked = await run(plane, "signing-key", "revoke", key_id, *own)
    assert revoked == f"revoked {key_id}, which signed 2 version(s)\n"
    assert key_id in await run(plane, "adapter", "show", "bot", *own)
    shutil.copyfile(public, tmp_path / "no-key")
    wrong = await run(
        plane, "adapter", "push", folders[0], "--sign", str(tmp_path / "no-key"), code=2
    )
    assert "not a private key" in wrong
