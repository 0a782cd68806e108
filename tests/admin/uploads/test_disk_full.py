"""A disk that is really full, one of its own for a served admin plane, and the reserve."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from adapters.format.validator import WEIGHTS_NAME
from adapters.store.folder import LocalStore
from store.database import Database
from tests.adapters.files import write_adapter
from tests.admin.conftest import write_model
from tests.admin.http.test_routes import problem
from tests.admin.serve import PATH, admin_key, admin_process, administration
from tests.admin.uploads.test_resumable import announce, append
from tests.admin.uploads.test_upload import parts, tar_of
from tests.plane import Plane, python
from tests.preloaded import ROOT

pytestmark = pytest.mark.full

DISK_BYTES = 4 << 20
MOUNT = 'mount -t tmpfs -o size="$0" tmpfs "$1" && shift && exec "$@"'


def admin_on_small_disk(folder: Path, dsn: str) -> tuple[Plane, Path]:
    """Returns an admin plane, and a folder that is a disk of DISK_BYTES for it alone."""
    disk = folder / "disk"
    disk.mkdir()
    plane = admin_process(folder / "admin", dsn, disk / "store")
    wrapped = ["unshare", "--mount", "sh", "-c", MOUNT, str(DISK_BYTES), str(disk)]
    plane.kind, plane.runs = "process", [*wrapped, *python(*plane.runs)]
    return plane, disk


async def test_a_full_disk_refuses_and_keeps_what_it_has(
    dsn: str, database: Database, tmp_path: Path
) -> None:
    key = await admin_key(database)
    server, disk = admin_on_small_disk(tmp_path, dsn)
    async with server:
        store = Path(f"/proc/{server.pid}/root{disk / 'store'}")
        write_model(store, "b" * 64)
        async with server.new_client(key, PATH) as client:
            await client.post("tenants", json={"name": "acme"})
            await client.post("models", json={"name": "tiny", "digest": "b" * 64})

            # Unpacked by a process that is told nothing of the disk.
            bomb = io.BytesIO()
            with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(WEIGHTS_NAME, bytes(2 * DISK_BYTES))
            fields = {"name": "bomb", "tenant": "acme"}
            files = {"file": ("a.zip", bomb.getvalue())}
            refused = problem(await client.post("adapters", data=fields, files=files), 507)
            assert (refused["code"], refused["type"]) == ("disk_full", "server_error")

            # Two pieces that fit alone and not together: the second goes on when there is room.
            half = 5 * DISK_BYTES // 8
            first, second = await announce(client, half), await announce(client, half)
            assert (await append(client, first, 0, bytes(half))).is_success
            refused = problem(await append(client, second, 0, bytes(half)), 507)
            assert refused["code"] == "disk_full"
            assert (await client.delete(f"uploads/{first}")).is_success
            came = (await client.get(f"uploads/{second}")).json()["offset"]
            assert 0 < came < half
            answer = await append(client, second, came, bytes(half - came))
            assert answer.json()["offset"] == half
            await client.delete(f"uploads/{second}")

            kept: list[str] = []
            while True:
                name = f"a{len(kept)}"
                digest = write_adapter(tmp_path / name, rank=32, seed=len(kept))
                fields = {"name": name, "tenant": "acme"}
                answer = await client.post("adapters", data=fields, files=parts(tmp_path / name))
                if answer.status_code != 201:
                    break
                kept.append(digest)
            assert problem(answer, 507)["code"] == "disk_full"
            assert len(kept) > 8
            assert sorted(p.name for p in (store / "adapters").iterdir()) == sorted(kept)
            assert list((store / "incoming").iterdir()) == []
            shown = (await client.get("adapters", params={"tenant": "acme"})).json()["data"]
            assert {adapter["name"] for adapter in shown} == {f"a{i}" for i in range(len(kept))}

            await client.delete("adapters/a0", params={"tenant": "acme"})
            answer = await client.post("adapters", data=fields, files=parts(tmp_path / name))
            assert answer.status_code == 201, answer.text


async def test_a_store_that_cannot_be_written_is_refused_by_name(
    dsn: str, database: Database, tmp_path: Path
) -> None:
    """What is there stays served, and uploads go on when the disk takes them again."""
    key = await admin_key(database)
    write_adapter(tmp_path / "adapter")
    files = parts(tmp_path / "adapter")
    fields = {"name": "bot", "tenant": "acme"}
    server, disk = admin_on_small_disk(tmp_path, dsn)
    async with server:
        write_model(Path(f"/proc/{server.pid}/root{disk / 'store'}"), "b" * 64)

        def remount(how: str) -> None:
            mount = ("mount", "-o", f"remount,{how}", str(disk))
            subprocess.run(["nsenter", "-t", str(server.pid), "-m", *mount], check=True)

        async with server.new_client(key, PATH) as client:
            await client.post("tenants", json={"name": "acme"})
            await client.post("models", json={"name": "tiny", "digest": "b" * 64})
            remount("ro")
            for answer in (
                await client.post("adapters", data=fields, files=files),
                await client.post("uploads", json={"bytes": 10, "filename": "a.tar"}),
            ):
                refused = problem(answer, 503)
                assert refused["code"] == "store_read_only"
                assert "Read-only file system" in refused["message"]
                assert str(disk) not in refused["message"]
                assert answer.headers["x-should-retry"] == "false"
            remount("rw")
            answer = await client.post("adapters", data=fields, files=files)
            assert answer.status_code == 201, answer.text


def test_a_new_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from loraplex.errors import BadSettings
from loraplex.settings import Settings
store, home = sys.argv[1:]
try:
    Settings(store=store, data_dir=Path(home)).open_store()
except BadSettings as error:
    print(error)
"""
    store = tmp_path / "store"
    store.mkdir()
    read_only = 'mount -t tmpfs -o ro tmpfs "$0" && exec "$@"'
    run = [sys.executable, "-c", script, str(store), str(tmp_path / "home")]
    command = ["unshare", "--mount", "sh", "-c", read_only, str(store), *run]
    told = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert told == f"store: {store} cannot be written: Read-only file system\n"


async def test_the_reserve_is_left_to_others(database: Database, tmp_path: Path) -> None:
    store = tmp_path / "store"
    write_model(store, "b" * 64)
    write_adapter(tmp_path / "adapter")
    async with administration(database, LocalStore(store, min_free_bytes=1 << 60)) as client:
        await client.post("tenants", json={"name": "acme"})
        await client.post("models", json={"name": "tiny", "digest": "b" * 64})
        fields = {"name": "bot", "tenant": "acme"}
        answer = await client.post("adapters", data=fields, files=parts(tmp_path / "adapter"))
        assert problem(answer, 507)["code"] == "disk_full"
        announcement = {"bytes": len(tar_of(tmp_path / "adapter")), "filename": "a.tar"}
        assert problem(await client.post("uploads", json=announcement), 507)["code"] == "disk_full"
        assert list((store / "incoming").iterdir()) == list((store / "adapters").iterdir()) == []
        adapters = await client.get("adapters", params={"tenant": "acme"})
        assert adapters.json()["data"] == []
