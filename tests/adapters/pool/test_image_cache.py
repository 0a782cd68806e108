"""The cache of packed images: always what the store holds, or nothing."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from adapters.format.validator import IMAGE_ALIGNMENT
from adapters.manifest import PROJECTIONS
from adapters.pool.image import MAGIC, ImageCache
from adapters.pool.loader import AdapterLoader
from adapters.pool.packed_image import AdapterImage
from adapters.pool.source import AdapterUnavailable
from adapters.store.folder import LocalStore, StoreUnavailable
from ops.base import Ops
from ops.registry import select
from tests.adapters.files import BASE, stage_adapter
from tests.ops.conftest import TILES, VARIANTS, backend
from tests.ops.packed_factor import read_factor

DIGEST = "0123456789abcdef" * 4


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def digest(store: LocalStore) -> str:
    folder = store.stage()
    digest = stage_adapter(folder)
    store.put("adapters", digest, folder)
    return digest


def make_loader(
    store: LocalStore, tmp_path: Path, cache_bytes: int = 1 << 30, ops: Ops | None = None
) -> AdapterLoader:
    cache = ImageCache(tmp_path / "cache", cache_bytes)
    return AdapterLoader(store, BASE, torch.float32, ops or select("reference"), cache)


def test_a_cache_makes_its_folder(tmp_path: Path) -> None:
    ImageCache(tmp_path / "data" / "images", 1 << 30)
    assert (tmp_path / "data" / "images").is_dir()


def test_second_fetch_needs_no_store(store: LocalStore, tmp_path: Path, digest: str) -> None:
    first = make_loader(store, tmp_path).fetch(digest)
    store.delete("adapters", digest)
    second = make_loader(store, tmp_path).fetch(digest)
    assert bytes(first.payload) == bytes(second.payload)
    assert (first.tables.rank == second.tables.rank).all()
    assert (first.tables.b_offset == second.tables.b_offset).all()


@pytest.mark.skipif(not VARIANTS, reason="no compiler")
def test_an_image_of_an_older_layout_is_built_again(
    store: LocalStore, tmp_path: Path, digest: str
) -> None:
    """The image is one of an older version, in whose images for a CPU B was [rank, N]."""
    old_name = f"2-{BASE.num_layers}x{len(PROJECTIONS)}-float32-rn"
    cpu = backend(VARIANTS[0])
    right = make_loader(store, tmp_path / "fresh", ops=cpu).fetch(digest)
    rows = make_loader(store, tmp_path / "fresh").fetch(digest)
    old = AdapterImage.of(digest, rows.tables, torch.from_numpy(rows.payload).flip(0))
    ImageCache(tmp_path / "cache", 1 << 30).save(old_name, old)
    loader = make_loader(store, tmp_path, ops=cpu)
    assert not loader.is_cached(digest)
    assert loader.fetch(digest).checksum == right.checksum != old.checksum
    assert loader.is_cached(digest)


@pytest.mark.skipif(not VARIANTS, reason="no compiler")
def test_workers_of_any_variant_share_an_image(
    store: LocalStore, tmp_path: Path, digest: str
) -> None:
    """A worker of another backend has its own, with the same numbers in its layout."""
    make_loader(store, tmp_path).fetch(digest)
    make_loader(store, tmp_path, ops=backend(VARIANTS[0])).fetch(digest)
    store.delete("adapters", digest)
    at = (1, PROJECTIONS.index("down_proj"))
    factors: list[Tensor] = []
    for name in ("reference", *VARIANTS, *TILES):
        loader = make_loader(store, tmp_path, ops=backend(name))
        image = loader.fetch(digest)
        numbers = torch.from_numpy(image.payload[image.tables.b_offset[at] :]).view(torch.float32)
        shape = (BASE.projection_shape(1, "down_proj")[1], int(image.tables.rank[at]))
        factors.append(read_factor(numbers, *shape, loader.layout.factors))
    assert len(list((tmp_path / "cache").rglob("*.img"))) == 2
    assert all(torch.equal(factor, factors[0]) for factor in factors) and factors[0].any()


def test_images_of_deleted_adapters_are_removed(
    store: LocalStore, tmp_path: Path, digest: str
) -> None:
    folder = store.stage()
    deleted = stage_adapter(folder, seed=1)
    store.put("adapters", deleted, folder)
    loader = make_loader(store, tmp_path)
    for each in (digest, deleted):
        loader.fetch(each)
    store.delete("adapters", deleted)
    cache = ImageCache(tmp_path / "cache", 1 << 30)

    def away(_digest: str) -> bool:
        raise StoreUnavailable("away")

    with pytest.raises(StoreUnavailable):
        cache.remove_deleted(away)
    assert cache.held[0] == 2
    cache.remove_deleted(lambda each: store.exists("adapters", each))
    assert cache.has(loader.layout.version, digest)
    assert [path.stem for path in (tmp_path / "cache").rglob("*.img")] == [digest]
    assert cache.held[0] == 1


def test_an_ephemeral_version_gets_no_file(store: LocalStore, tmp_path: Path, digest: str) -> None:
    make_loader(store, tmp_path).fetch(digest, keeps_file=False)
    assert not list((tmp_path / "cache").rglob("*.img"))


@pytest.mark.parametrize("damage", ["first byte", "header", "payload", "cut", "longer", "empty"])
def test_a_damaged_image_is_built_again(
    store: LocalStore, tmp_path: Path, digest: str, damage: str
) -> None:
    expected = bytes(make_loader(store, tmp_path).fetch(digest).payload)
    (path,) = (tmp_path / "cache").rglob("*.img")
    raw = bytearray(path.read_bytes())
    match damage:
        case "first byte":
            raw[0] ^= 1
        case "header":
            raw[100] ^= 1
        case "payload":
            raw[-1] ^= 1
        case "cut":
            raw = raw[:-64]
        case "longer":
            raw += b"\0"
        case _:
            raw = bytearray()
    path.unlink()
    path.write_bytes(raw)
    assert bytes(make_loader(store, tmp_path).fetch(digest).payload) == expected


def test_an_image_that_cannot_be_read_is_built_again(
    store: LocalStore, tmp_path: Path, digest: str
) -> None:
    """Nor removed, nor written again: as a folder in its place."""
    expected = bytes(make_loader(store, tmp_path).fetch(digest).payload)
    (path,) = (tmp_path / "cache").rglob("*.img")
    path.unlink()
    path.mkdir()
    assert bytes(make_loader(store, tmp_path).fetch(digest).payload) == expected


def test_a_disk_that_turned_read_only_still_gives_its_images(
    store: LocalStore, tmp_path: Path, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make_loader(store, tmp_path)
    expected = bytes(loader.fetch(digest).payload)
    store.delete("adapters", digest)

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", fail)
    assert bytes(loader.fetch(digest).payload) == expected


def test_an_image_under_anothers_name_is_not_taken(
    store: LocalStore, tmp_path: Path, digest: str
) -> None:
    folder = store.stage()
    other = stage_adapter(folder, seed=1)
    store.put("adapters", other, folder)
    loader = make_loader(store, tmp_path)
    expected = bytes(loader.fetch(digest).payload)
    loader.fetch(other)
    folder = next((tmp_path / "cache").rglob(f"{other}.img")).parent
    (folder / f"{other}.img").replace(folder / f"{digest}.img")
    assert bytes(make_loader(store, tmp_path).fetch(digest).payload) == expected


def test_an_image_whose_header_has_another_shape_is_built_again(
    store: LocalStore, tmp_path: Path, digest: str
) -> None:
    expected = bytes(make_loader(store, tmp_path).fetch(digest).payload)
    (path,) = (tmp_path / "cache").rglob("*.img")
    header = msgspec.msgpack.encode({"digest": digest})
    size = len(header).to_bytes(4, "little")
    path.unlink()
    path.write_bytes(MAGIC + size + sha256(header).digest() + header)
    assert bytes(make_loader(store, tmp_path).fetch(digest).payload) == expected


def cut(path: Path) -> None:
    path.chmod(0o600)
    os.truncate(path, path.stat().st_size - 4096)


def test_an_image_on_the_host_outlives_its_file(
    store: LocalStore, tmp_path: Path, digest: str
) -> None:
    """A mapping of the file would kill the process here."""
    make_loader(store, tmp_path).fetch(digest)
    loader = make_loader(store, tmp_path)
    image = loader.fetch(digest)
    expected = bytes(image.payload)
    cut(next((tmp_path / "cache").rglob("*.img")))
    assert image.payload.tobytes() == expected


def test_only_the_image_that_was_proved_is_taken(
    store: LocalStore, tmp_path: Path, digest: str
) -> None:
    """A cached image whole in itself but of other bytes, as a faulty build would have left."""
    proved = make_loader(store, tmp_path).fetch(digest)
    other = AdapterImage.of(digest, proved.tables, torch.zeros(proved.num_bytes, dtype=torch.uint8))
    moved = replace(proved.tables, b_offset=proved.tables.b_offset + IMAGE_ALIGNMENT)
    for wrong in (other, replace(proved, tables=moved)):
        loader = make_loader(store, tmp_path)
        ImageCache(tmp_path / "cache", 1 << 30).save(loader.layout.version, wrong)
        assert loader.fetch(digest).checksum == wrong.checksum != proved.checksum
        mended = loader.fetch(digest, proved.checksum)
        assert mended.checksum == loader.fetch(digest).checksum == proved.checksum
        assert bytes(mended.payload) == bytes(proved.payload)
    with pytest.raises(AdapterUnavailable) as caught:
        make_loader(store, tmp_path).fetch(digest, "0" * 64)
    assert caught.value.code == "adapter.image.mismatch"
    assert not list((tmp_path / "cache").rglob("*.img"))


def test_a_damaged_store_file_is_refused(store: LocalStore, tmp_path: Path, digest: str) -> None:
    path = store.adapter_folder(digest) / "adapter_model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.chmod(0o600)
    path.write_bytes(raw)
    with pytest.raises(AdapterUnavailable) as caught:
        make_loader(store, tmp_path).fetch(digest)
    assert caught.value.code == "adapter.store.corrupt"
    assert not list((tmp_path / "cache").rglob("*.img"))


@pytest.mark.parametrize("name", [DIGEST, "../../etc/passwd"])
def test_what_is_not_there(store: LocalStore, tmp_path: Path, name: str) -> None:
    with pytest.raises(AdapterUnavailable) as caught:
        make_loader(store, tmp_path).fetch(name)
    assert caught.value.code == "adapter.store.missing"


def test_the_cache_keeps_its_bound(store: LocalStore, tmp_path: Path) -> None:
    digests: list[str] = []
    for seed in range(4):
        folder = store.stage()
        digests.append(stage_adapter(folder, projections=("q_proj",), seed=seed))
        store.put("adapters", digests[-1], folder)
    make_loader(store, tmp_path).fetch(digests[0])
    size = next((tmp_path / "cache").rglob("*.img")).stat().st_size
    loader = make_loader(store, tmp_path, cache_bytes=2 * size + size // 2)
    for digest in (digests[0], digests[1], digests[0], digests[2]):
        loader.fetch(digest)
    files = {path.stem for path in (tmp_path / "cache").rglob("*.img")}
    assert files == {d for d in digests if loader.is_cached(d)} == {digests[0], digests[2]}


@pytest.mark.parametrize("name", ["a.tmp", "a.img"])
def test_one_begins_beside_another_of_the_same_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Which writes and drops files meanwhile: one is gone when it was listed."""
    file = tmp_path / "layout" / name
    file.parent.mkdir()
    file.write_bytes(b"x")
    listed = Path.glob

    def glob(folder: Path, pattern: str) -> Iterator[Path]:
        found = list(listed(folder, pattern))
        for path in found:
            path.unlink()
        return iter(found)

    monkeypatch.setattr(Path, "glob", glob)
    assert not ImageCache(tmp_path, 1 << 30).has("layout", "a")


def test_those_of_one_machine_do_not_disturb_each_other(
    store: LocalStore, tmp_path: Path, digest: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two write the same image, others read it and begin: nobody meets half of one or loses his."""
    image = make_loader(store, tmp_path).fetch(digest)
    large = AdapterImage.of(digest, image.tables, torch.zeros(2 << 20, dtype=torch.uint8))
    root = tmp_path / "shared"

    def write() -> None:
        cache = ImageCache(root, 1 << 30)
        for _ in range(200):
            cache.save("layout", large)

    def read() -> None:
        while writing:
            loaded = ImageCache(root, 1 << 30).load("layout", digest)
            assert loaded is None or loaded.checksum == large.checksum

    writing = True
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor() as threads:
        writers = [threads.submit(write) for _ in range(2)]
        reader = threads.submit(read)
        try:
            for writer in writers:
                writer.result(timeout=60)
        finally:
            writing = False
        reader.result(timeout=60)
    assert [record.getMessage() for record in caplog.records] == []
    assert [path.name for path in (root / "layout").iterdir()] == [f"{digest}.img"]


def test_an_image_written_after_a_miss_stays(
    store: LocalStore, tmp_path: Path, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker of the machine writes it right after this one found no file."""
    image = make_loader(store, tmp_path).fetch(digest)
    root = tmp_path / "shared"
    cache, other = ImageCache(root, 1 << 30), ImageCache(root, 1 << 30)
    opened = Path.open

    def open_too_early(path: Path, mode: str) -> object:
        monkeypatch.setattr(Path, "open", opened)
        try:
            return path.open(mode)
        finally:
            other.save("layout", image)

    monkeypatch.setattr(Path, "open", open_too_early)
    assert cache.load("layout", digest) is None
    loaded = cache.load("layout", digest)
    assert loaded is not None
    assert loaded.checksum == image.checksum


def test_what_a_dead_writer_left_is_removed(tmp_path: Path) -> None:
    dead, written = tmp_path / "layout" / "a.1.tmp", tmp_path / "layout" / "a.2.tmp"
    dead.parent.mkdir()
    dead.write_bytes(b"x")
    written.write_bytes(b"x")
    with written.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ImageCache(tmp_path, 1 << 30)
        assert (dead.exists(), written.exists()) == (False, True)
    ImageCache(tmp_path, 1 << 30)
    assert not written.exists()
