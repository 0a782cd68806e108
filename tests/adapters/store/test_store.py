"""What every store keeps to: a folder, and the buckets of three kinds of servers."""

from __future__ import annotations

import contextlib
import errno
import http.client
import http.server
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import boto3
import httpx
import pytest
import torch

from adapters.pool.image import ImageCache
from adapters.pool.loader import AdapterLoader
from adapters.pool.source import AdapterUnavailable
from adapters.store import objects
from adapters.store.buckets import CLIENT, Bucket
from adapters.store.folder import Kind, LocalStore, NotInStore, Store, StoreUnavailable, hold
from adapters.store.objects import ObjectStore
from adapters.store.opening import open_bucket, open_store
from ops.registry import select
from tests.adapters.files import BASE, stage_adapter
from tests.buckets import BUCKET, SERVERS
from tests.plane import free_port
from tests.preloaded import ROOT
from tests.stored import kept

DIGEST = "0123456789abcdef" * 4
OTHER = "f" * 64
HOSTILE = ["", "..", "../" * 20 + "etc", "/etc/passwd", DIGEST.upper(), DIGEST + "\n", "a" * 63]


def environment(scheme: str) -> Iterator[None]:
    with SERVERS[scheme]() as found, pytest.MonkeyPatch.context() as patch:
        for name, value in found.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    yield from environment("s3")


@pytest.fixture(scope="module")
def gs() -> Iterator[None]:
    yield from environment("gs")


@pytest.fixture(scope="module")
def az() -> Iterator[None]:
    yield from environment("az")


@pytest.fixture(params=["folder", *SERVERS])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "store")
    request.getfixturevalue(request.param)
    return f"{request.param}://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def store(location: str, tmp_path: Path) -> Store:
    return open_store(location, tmp_path / "cache")


@pytest.fixture
def elsewhere(location: str, tmp_path: Path) -> Store:
    """The same store on another machine."""
    return open_store(location, tmp_path / "other cache")


@pytest.fixture(autouse=True)
def no_use_is_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of which a test has a path are not read by others, where it does not say so."""
    monkeypatch.setattr(objects, "IN_USE_S", 0.0)


@pytest.fixture
def bucket(s3: None, tmp_path: Path) -> ObjectStore:
    store = open_store(f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "cache", cache_bytes=2500)
    assert isinstance(store, ObjectStore)
    return store


@pytest.fixture(params=list(SERVERS))
def any_bucket(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ObjectStore, Bucket]:
    """A store, and the bucket itself that it is in."""
    request.getfixturevalue(request.param)
    location = f"{request.param}://{BUCKET}/{tmp_path.name}"
    store = open_store(location, tmp_path / "cache", cache_bytes=2500)
    assert isinstance(store, ObjectStore)
    return store, open_bucket(request.param, BUCKET)


def keys(store_name: str, scheme: str = "s3") -> list[str]:
    return [key for key, _ in open_bucket(scheme, BUCKET).list(f"{store_name}/")]


def kept_at(location: str, kind: Kind) -> list[str]:
    """The addresses of all that is in the store, in order."""
    scheme, separator, _ = location.partition("://")
    if separator:
        return [Path(key).name for key in keys(f"{Path(location).name}/index/{kind}", scheme)]
    return kept(LocalStore(Path(location)), kind)


def stage(store: Store, content: bytes = b"x") -> Path:
    folder = store.stage()
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_bytes(b"{}")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_was_put_is_there_for_all(store: Store, elsewhere: Store, location: str) -> None:
    folder = stage(store)
    assert not store.exists("models", DIGEST)
    store.put("models", DIGEST, folder)
    assert not folder.exists()
    assert kept_at(location, "models") == [DIGEST] and kept_at(location, "adapters") == []
    for reader in (store, elsewhere):
        assert reader.exists("models", DIGEST) and not reader.exists("adapters", DIGEST)
        assert content(reader.model_folder(DIGEST)) == {
            "model.safetensors": b"x",
            "config.json": b"{}",
        }
        assert not list(reader.incoming.iterdir())


def test_a_model_without_its_weights(store: Store, elsewhere: Store) -> None:
    store.put("models", DIGEST, stage(store))
    for weights in (False, True, False):
        folder = elsewhere.model_folder(DIGEST, weights=weights)
        assert (folder / "config.json").read_bytes() == b"{}"
        assert not weights or (folder / "model.safetensors").read_bytes() == b"x"


def test_a_version_never_changes(store: Store, elsewhere: Store) -> None:
    store.put("adapters", DIGEST, stage(store, b"first"))
    second = stage(elsewhere, b"second")
    elsewhere.put("adapters", DIGEST, second)
    assert not second.exists()
    for reader in (store, elsewhere):
        assert content(reader.adapter_folder(DIGEST))["model.safetensors"] == b"first"


def test_what_lies_in_the_store_can_be_looked_at(store: Store, elsewhere: Store) -> None:
    """By one that has brought nothing of it to its cache."""
    staged = stage(store, b"first")
    expected = content(staged)
    store.put("adapters", DIGEST, staged)
    assert elsewhere.adapter_sizes(DIGEST) == {name: len(data) for name, data in expected.items()}
    for name, data in expected.items():
        assert b"".join(elsewhere.adapter_chunks(DIGEST, name)) == data
    store.delete("adapters", DIGEST)
    with pytest.raises(NotInStore):
        elsewhere.adapter_sizes(DIGEST)


def test_delete_and_absence(store: Store, location: str) -> None:
    store.put("adapters", DIGEST, stage(store))
    store.delete("adapters", DIGEST)
    store.delete("adapters", DIGEST)
    assert kept_at(location, "adapters") == [] and not store.exists("adapters", DIGEST)
    for find in (store.adapter_folder, store.model_folder):
        with pytest.raises(NotInStore):
            find(DIGEST)
    store.put("adapters", DIGEST, stage(store, b"again"))
    assert content(store.adapter_folder(DIGEST))["model.safetensors"] == b"again"


@pytest.mark.parametrize("digest", HOSTILE)
def test_only_digests_become_paths(store: Store, tmp_path: Path, digest: str) -> None:
    staged = stage(store)
    before = sorted(tmp_path.rglob("*"))
    for call in (
        lambda: store.adapter_folder(digest),
        lambda: store.model_folder(digest),
        lambda: store.model_folder(digest, weights=False),
        lambda: store.exists("models", digest),
        lambda: store.delete("adapters", digest),
        lambda: store.put("adapters", digest, staged),
    ):
        with pytest.raises(ValueError, match="not a store address"):
            call()
    assert sorted(tmp_path.rglob("*")) == before


def test_many_at_once(store: Store, elsewhere: Store, location: str) -> None:
    """Threads of two machines put and read the same few digests."""
    digests = [f"{i:064x}" for i in range(4)]

    def work(i: int) -> None:
        one, digest = (store, elsewhere)[i % 2], digests[i % 4]
        one.put("adapters", digest, stage(one, digest.encode()))
        assert content(one.adapter_folder(digest))["model.safetensors"] == digest.encode()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(32)))
    assert kept_at(location, "adapters") == digests
    assert not list(store.incoming.iterdir()) and not list(elsewhere.incoming.iterdir())


WRITER = """
import sys, pathlib
from adapters.store.opening import open_store
store = open_store(sys.argv[1], pathlib.Path(sys.argv[2]))
for i in range(10**6):
    staged = store.stage()
    (staged / "a").write_bytes(b"a" * 1000)
    (staged / "b").write_bytes(bytes([i % 251]) * 200_000)
    store.put("adapters", f"{i:064x}", staged)
    print(i, flush=True)
"""


@pytest.mark.full
def test_a_killed_writer_leaves_whole_folders_and_what_is_swept(
    store: Store, elsewhere: Store, location: str, tmp_path: Path
) -> None:
    rng = random.Random(5)
    known = 0
    for attempt in range(4):
        command = [sys.executable, "-c", WRITER, location, str(tmp_path / f"writer {attempt}")]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            acknowledged = [writer.stdout.readline() for _ in range(rng.randrange(1, 6))]
            time.sleep(rng.random() * 0.02)
            writer.send_signal(signal.SIGKILL)
        known = max(known, int(acknowledged[-1]))
        if isinstance(store, ObjectStore):
            open_store(location, tmp_path / f"writer {attempt}").sweep(max_age_s=-1)
    digests = kept_at(location, "adapters")
    assert digests == [f"{i:064x}" for i in range(len(digests))]
    assert len(digests) > known
    for i, digest in enumerate(digests):
        assert content(elsewhere.adapter_folder(digest)) == {
            "a": b"a" * 1000,
            "b": bytes([i % 251]) * 200_000,
        }
    store.sweep(max_age_s=-1)
    assert not list(store.incoming.iterdir())


def test_sweep_leaves_what_is_fresh_or_held(store: Store) -> None:
    old, fresh, held = (stage(store) for _ in range(3))
    for folder in (old, held):
        for path in (*folder.iterdir(), folder):
            os.utime(path, (0, 0))
    with hold(held):
        store.sweep(max_age_s=60)
        assert sorted(store.incoming.iterdir()) == sorted([fresh, held])
        with pytest.raises(BlockingIOError), hold(held):
            pass
    store.sweep(max_age_s=60)
    assert list(store.incoming.iterdir()) == [fresh]
    (fresh / "config.json").write_bytes(b"still being written")
    os.utime(fresh, (0, 0))
    store.sweep(max_age_s=60)
    assert fresh.exists()


def test_a_hold_ends_with_its_process(store: Store) -> None:
    folder = stage(store)
    script = (
        "import pathlib, sys, time; from adapters.store.folder import hold\n"
        "with hold(pathlib.Path(sys.argv[1])): print(flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        store.sweep(max_age_s=-1)
        assert folder.exists()
        holder.kill()
    store.sweep(max_age_s=-1)
    assert not folder.exists()


def test_the_reserve_is_kept_at(location: str, tmp_path: Path) -> None:
    greedy = open_store(location, tmp_path / "cache", min_free_bytes=1 << 60)
    with pytest.raises(OSError) as caught:
        greedy.check_room()
    assert caught.value.errno == errno.ENOSPC
    modest = open_store(location, tmp_path / "cache", min_free_bytes=1 << 10)
    modest.check_room(1 << 10)
    with pytest.raises(OSError):
        modest.check_room(1 << 60)


@pytest.mark.parametrize(
    "location",
    ["http://x/y", "s3://", "s3:///prefix", "gs://", "az:///prefix", "s3://x/a//b", "gs://x/../b"],
)
def test_locations_that_are_none(location: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=location):
        open_store(location, tmp_path)


# Of the bucket alone


def test_the_cache_keeps_its_bound_and_the_last_used(bucket: ObjectStore, tmp_path: Path) -> None:
    digests = [f"{i:064x}" for i in range(4)]
    for digest in digests:
        bucket.put("adapters", digest, stage(bucket, bytes(1000)))
        time.sleep(0.01)
    cached = LocalStore(tmp_path / "cache")
    assert kept(cached, "adapters") == digests[2:]
    bucket.adapter_folder(digests[2])
    bucket.adapter_folder(digests[0])
    assert kept(cached, "adapters") == [digests[0], digests[2]]
    assert kept_at(f"s3://{BUCKET}/{tmp_path.name}", "adapters") == digests


def test_the_cache_is_listed_once_for_many_adapters(
    s3: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing thousands of folders for each adapter would hold up all others."""
    cached = LocalStore(tmp_path / "cache")
    old = [f"{i:064x}" for i in range(50)]
    for place, digest in enumerate(old):
        cached.put("adapters", digest, stage(cached, bytes(98)))
        os.utime(cached.adapter_folder(digest), (place, place))
    bucket = open_store(f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "cache", cache_bytes=5000)
    listed, lists = Path.iterdir, list[Path]()

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder == tmp_path / "cache" / "adapters":
            lists.append(folder)
        return listed(folder)

    new = [f"{i:064x}" for i in range(50, 59)]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", iterdir)
        for digest in new:
            bucket.put("adapters", digest, stage(bucket, bytes(98)))
            assert len(lists) <= 3
    now = kept(cached, "adapters")
    assert 40 <= len(now) <= 50 and now == [*old, *new][-len(now) :], "the oldest went first"


def test_what_another_process_may_be_reading_is_not_trimmed(
    s3: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the files of a folder one after the other; a minute later the bound holds again."""
    monkeypatch.setattr(objects, "IN_USE_S", 60.0)
    location = f"s3://{BUCKET}/{tmp_path.name}"
    one, two = (open_store(location, tmp_path / "cache", cache_bytes=800) for _ in range(2))
    digests = [f"{i:064x}" for i in range(12)]
    one.put("adapters", digests[0], stage(one, bytes(98)))
    reading = two.adapter_folder(digests[0])
    for digest in digests[1:-1]:
        one.put("adapters", digest, stage(one, bytes(98)))
    assert len(content(reading)) == 2, "it is still there"
    for digest in digests[1:-1]:
        os.utime(one.adapter_folder(digest), (0, 0))
    os.utime(reading, (time.time() - 61,) * 2)
    one.put("adapters", digests[-1], stage(one, bytes(98)))
    assert len(kept(LocalStore(tmp_path / "cache"), "adapters")) <= 8


def test_processes_that_use_one_cache_keep_its_bound(s3: None, tmp_path: Path) -> None:
    location = f"s3://{BUCKET}/{tmp_path.name}"
    stores = [open_store(location, tmp_path / "cache", cache_bytes=1600) for _ in range(2)]
    for i in range(30):
        stores[i % 2].put("adapters", f"{i:064x}", stage(stores[i % 2], bytes(98)))
    assert 14 <= len(kept(LocalStore(tmp_path / "cache"), "adapters")) <= 16 + len(stores)


def test_a_folder_is_fetched_once(bucket: ObjectStore, tmp_path: Path) -> None:
    bucket.put("models", DIGEST, stage(bucket))
    bucket.put("adapters", DIGEST, stage(bucket))
    other = open_store(f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "other")
    head = other.model_folder(DIGEST, weights=False)
    assert set(content(head)) == {"config.json"}
    folders = [other.adapter_folder(DIGEST), other.model_folder(DIGEST), head]
    client = boto3.client("s3")
    for key in keys(tmp_path.name):
        client.delete_object(Bucket=BUCKET, Key=key)
    again = [
        other.adapter_folder(DIGEST),
        other.model_folder(DIGEST),
        other.model_folder(DIGEST, weights=False),
    ]
    assert again[:2] == folders[:2] and set(content(again[2])) >= {"config.json"}


def test_what_was_changed_in_the_bucket_is_not_taken(
    any_bucket: tuple[ObjectStore, Bucket], tmp_path: Path
) -> None:
    store, bucket = any_bucket
    store.put("adapters", DIGEST, stage(store))
    listed = [key for key, _ in bucket.list(tmp_path.name)]
    (key,) = [key for key in listed if key.endswith("model.safetensors")]
    bucket.write(key, b"longer")
    other = ObjectStore(
        bucket, tmp_path.name, tmp_path / "other", min_free_bytes=0, cache_bytes=2500
    )
    with pytest.raises(StoreUnavailable, match="6 bytes, not 1"):
        other.adapter_folder(DIGEST)
    bucket.delete(key)
    with pytest.raises(StoreUnavailable):
        other.adapter_folder(DIGEST)
    index = f"{tmp_path.name}/index/adapters/{DIGEST}"
    for damage in (b"", b"{}", b'{"put": "../..", "files": {"a": 1}}'):
        bucket.write(index, damage)
        with pytest.raises(StoreUnavailable):
            other.adapter_folder(DIGEST)
    assert not list((tmp_path / "other" / "incoming").iterdir())


@pytest.mark.parametrize("scheme", SERVERS)
def test_a_bucket_that_is_not_there_is_no_empty_store(
    request: pytest.FixtureRequest, tmp_path: Path, scheme: str
) -> None:
    request.getfixturevalue(scheme)
    store = open_store(f"{scheme}://absent", tmp_path)
    with pytest.raises(StoreUnavailable) as caught:
        store.exists("adapters", DIGEST)
    assert caught.value.reason in (
        "answers NoSuchBucket (status 404)",
        "answers ContainerNotFound (status 404)",
    )
    with pytest.raises(StoreUnavailable):
        store.put("models", DIGEST, stage(store))


@pytest.mark.parametrize(
    ("scheme", "named"), [("s3", "no credentials"), ("gs", "service account"), ("az", "Account")]
)
def test_settings_of_the_environment_that_are_missing_or_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, named: str
) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", "{")
    with pytest.raises(ValueError, match=f"^{scheme}://bucket: .*{named}"):
        open_store(f"{scheme}://bucket", tmp_path)


def test_a_profile_says_where_and_who(
    s3: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials of a program, as of a sign-in, and the endpoint, from boto3's files."""
    url, config, program = os.environ["AWS_ENDPOINT_URL"], tmp_path / "config", tmp_path / "program"
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    credentials = '{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b"}'
    program.write_text(f"#!/bin/sh\necho '{credentials}'\n")
    program.chmod(0o700)
    config.write_text(
        f"[profile ours]\nendpoint_url={url}\nregion=eu-west-1\ncredential_process={program}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "ours")
    store = open_store(f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "cache")
    store.put("models", DIGEST, stage(store))
    assert store.exists("models", DIGEST)
    monkeypatch.setenv("AWS_PROFILE", "nobodys")
    with pytest.raises(ValueError, match="nobodys"):
        open_store(f"s3://{BUCKET}", tmp_path / "cache")


def test_a_sweep_of_the_bucket_removes_what_no_entry_names(
    any_bucket: tuple[ObjectStore, Bucket], tmp_path: Path
) -> None:
    store, bucket = any_bucket

    def listed() -> list[str]:
        return [key for key, _ in bucket.list(tmp_path.name)]

    store.put("adapters", DIGEST, stage(store))
    store.put("models", OTHER, stage(store))
    whole = listed()
    for left in (f"adapters/{DIGEST}/other/a", f"adapters/{OTHER}/put/a", f"models/{DIGEST}/p/b"):
        bucket.write(f"{tmp_path.name}/{left}", b"")
    store.sweep_bucket(max_age_s=3600)
    assert len(listed()) == len(whole) + 3
    time.sleep(1.1)
    store.sweep_bucket(max_age_s=0)
    assert listed() == whole


def test_a_sweep_ends_uploads_that_were_not_finished(bucket: ObjectStore, tmp_path: Path) -> None:
    client = boto3.client("s3")
    client.create_multipart_upload(Bucket=BUCKET, Key=f"{tmp_path.name}/adapters/{DIGEST}/p/a")
    bucket.sweep_bucket(max_age_s=3600)
    assert not client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")


def test_the_objects_of_earlier_versions_are_read(bucket: ObjectStore, tmp_path: Path) -> None:
    """As 0.1.0 wrote them, with boto3."""
    client, prefix = boto3.client("s3"), tmp_path.name
    entry = b'{"put":"00112233445566ff","files":{"config.json":2,"model.safetensors":9437184}}'
    put = f"{prefix}/adapters/{DIGEST}/00112233445566ff"
    client.put_object(Bucket=BUCKET, Key=f"{put}/config.json", Body=b"{}")
    (tmp_path / "large").write_bytes(bytes(9 << 20))
    client.upload_file(str(tmp_path / "large"), BUCKET, f"{put}/model.safetensors")
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/index/adapters/{DIGEST}", Body=entry)
    assert bucket.exists("adapters", DIGEST)
    assert content(bucket.adapter_folder(DIGEST)) == {
        "config.json": b"{}",
        "model.safetensors": bytes(9 << 20),
    }
    bucket.sweep_bucket(max_age_s=-1)
    assert len(keys(prefix)) == 3
    bucket.delete("adapters", DIGEST)
    assert keys(prefix) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_sweep_asks_only_for_what_may_be_wrong(
    bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever is left of failed puts, before, between and after the digests of an index."""
    chance = random.Random(seed)
    digests = [f"{number:064x}" for number in chance.sample(range(1 << 60), 24)]
    for digest in digests[:12]:
        bucket.put("adapters", digest, stage(bucket))
    whole = keys(tmp_path.name)
    client = boto3.client("s3")
    wrong = chance.sample(digests, 6)
    for digest in wrong:
        key = f"{tmp_path.name}/adapters/{digest}/{chance.choice('09az')}put/a"
        client.put_object(Bucket=BUCKET, Key=key, Body=b"")
    asked: list[str] = []
    real = Bucket.read

    def read(remote: Bucket, key: str) -> bytes:
        asked.append(key.rpartition("/")[2])
        return real(remote, key)

    monkeypatch.setattr(Bucket, "read", read)
    time.sleep(1.1)
    bucket.sweep_bucket(max_age_s=0)
    assert keys(tmp_path.name) == whole
    assert sorted(asked) == sorted(wrong)


def test_an_adapter_is_loaded_from_the_bucket_and_its_absence_named(
    bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = bucket.stage()
    digest = stage_adapter(staged)
    bucket.put("adapters", digest, staged)

    def loader(name: str) -> AdapterLoader:
        store = open_store(f"s3://{BUCKET}/{tmp_path.name}", tmp_path / name / "store")
        cache = ImageCache(tmp_path / name, 1 << 20)
        return AdapterLoader(store, BASE, torch.float32, select("reference"), cache)

    assert loader("machine").fetch(digest).digest == digest
    with pytest.raises(AdapterUnavailable) as caught:
        loader("machine").fetch(OTHER)
    assert caught.value.code == "adapter.store.missing"
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    started = time.monotonic()
    with pytest.raises(AdapterUnavailable) as caught:
        loader("other machine").fetch(digest)
    assert caught.value.code == "adapter.store.unreadable"
    assert "127.0.0.1" not in str(caught.value), "tenants read it"
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("is_cached", [True, False])
def test_an_adapter_does_not_wait_for_a_model(
    bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_cached: bool
) -> None:
    """Gigabytes may be on their way for minutes."""
    bucket.put("models", DIGEST, stage(bucket))
    bucket.put("adapters", OTHER, stage(bucket))
    other = open_store(f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "other")
    assert isinstance(other, ObjectStore)
    if is_cached:
        other.adapter_folder(OTHER)
    is_on_its_way, may_come = threading.Event(), threading.Event()
    chunks = Bucket.chunks

    def slow(remote: Bucket, key: str) -> Iterator[bytes]:
        if f"{tmp_path.name}/models/" in key:
            is_on_its_way.set()
            may_come.wait(60)
        return chunks(remote, key)

    monkeypatch.setattr(Bucket, "chunks", slow)
    with ThreadPoolExecutor(2) as pool:
        model = pool.submit(other.model_folder, DIGEST)
        try:
            assert is_on_its_way.wait(60)
            adapter = pool.submit(other.adapter_folder, OTHER)
            assert adapter.result(timeout=30).is_dir() and not model.done()
        finally:
            may_come.set()
        assert model.result(timeout=60).is_dir()


def test_what_is_asked_for_is_not_trimmed(
    bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for two: another comes when the one used longest ago was found, and not yet touched."""
    digests = [f"{i:064x}" for i in range(3)]
    for digest in (digests[2], *digests[:2]):
        bucket.put("adapters", digest, stage(bucket, bytes(1000)))
    is_found, may_go_on = threading.Event(), threading.Event()
    touch = os.utime

    def slow(path: Path) -> None:
        if path.name == digests[0]:
            is_found.set()
            may_go_on.wait(60)
        touch(path)

    monkeypatch.setattr(os, "utime", slow)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(bucket.adapter_folder, digests[0])
        try:
            assert is_found.wait(60)
            bucket.adapter_folder(digests[2])
        finally:
            may_go_on.set()
        assert len(content(asked.result(timeout=60))) == 2


def test_what_another_process_has_trimmed_meanwhile_harms_nobody(
    bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one machine have one cache: one is gone when it was listed, and not yet looked
    at."""
    digests = [f"{i:064x}" for i in range(3)]
    for digest in digests[:2]:
        bucket.put("adapters", digest, stage(bucket, bytes(1000)))
    other = LocalStore(tmp_path / "cache")
    listed = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        found = list(listed(folder))
        if folder == tmp_path / "cache" / "adapters":
            other.delete("adapters", digests[0])
        return iter(found)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", iterdir)
        bucket.put("adapters", digests[2], stage(bucket, bytes(1000)))
    assert kept(other, "adapters") == digests[1:]


def test_two_threads_bring_it_once(bucket: ObjectStore, tmp_path: Path) -> None:
    bucket.put("models", DIGEST, stage(bucket, bytes(100_000)))
    other = open_store(f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "other")
    barrier = threading.Barrier(8)

    def read(_: int) -> Path:
        barrier.wait()
        return other.model_folder(DIGEST)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(read, range(8)))) == 1


REFUSED = ("x-amz-checksum", "x-amz-sdk-checksum", "x-amz-trailer", "aws-chunked")
"""Beginnings of headers that stores without checksums refuse, and a coding."""


@contextlib.contextmanager
def refusing_proxy(endpoint: str, is_refused: Callable[[str, str], bool]) -> Iterator[str]:
    """A server in front of another one, which refuses requests with certain headers as stores do
    that do not know them."""
    server = httpx.URL(endpoint)

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if any(is_refused(name.lower(), value) for name, value in self.headers.items()):
                text = (
                    b"<Error><Code>NotImplemented</Code><Message>no such header</Message></Error>"
                )
                self.reply(501, {"content-length": str(len(text))}, text)
                return
            connection = http.client.HTTPConnection(server.host, server.port or 80)
            connection.request(self.command, self.path, body, dict(self.headers))
            found = connection.getresponse()
            kept = {name: each for name, each in found.getheaders() if name.lower() != "connection"}
            self.reply(found.status, kept, found.read())
            connection.close()

        def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()


def test_a_store_that_refuses_checksums_works(
    s3: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a file that is sent in parts."""

    def is_refused(name: str, value: str) -> bool:
        return name.startswith(REFUSED) or value.startswith(REFUSED)

    with refusing_proxy(os.environ["AWS_ENDPOINT_URL"], is_refused) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        location = f"s3://{BUCKET}/{tmp_path.name}"
        store = open_store(location, tmp_path / "cache")
        staged = store.stage()
        (staged / "adapter_model.safetensors").write_bytes(bytes(9 << 20))
        (staged / "adapter_config.json").write_text("{}")
        store.put("adapters", DIGEST, staged)
        other = open_store(location, tmp_path / "other")
        assert (other.adapter_folder(DIGEST) / "adapter_config.json").read_text() == "{}"
        assert other.adapter_sizes(DIGEST)["adapter_model.safetensors"] == 9 << 20
        assert b"".join(other.adapter_chunks(DIGEST, "adapter_config.json")) == b"{}"
        other.delete("adapters", DIGEST)
        assert keys(tmp_path.name) == []


def test_a_file_may_take_longer_to_send_than_an_answer_to_come(
    s3: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_refused(name: str, value: str) -> bool:
        if name == "content-length" and int(value) >= 1 << 20:
            time.sleep(2)
        return False

    monkeypatch.setitem(CLIENT, "read_timeout", timedelta(seconds=1))
    with refusing_proxy(os.environ["AWS_ENDPOINT_URL"], is_refused) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        store = open_store(f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "cache")
        store.put("models", DIGEST, stage(store, bytes(9 << 20)))
        assert store.exists("models", DIGEST)


def test_the_stores_own_words_are_reported(
    s3: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing_proxy(os.environ["AWS_ENDPOINT_URL"], lambda *_: True) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        store = open_store(f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "cache")
        staged = store.stage()
        (staged / "adapter_config.json").write_text("{}")
        for act in (
            lambda: store.adapter_folder(DIGEST),
            lambda: store.put("adapters", DIGEST, staged),
        ):
            with pytest.raises(StoreUnavailable, match="no such header") as caught:
                act()
            assert caught.value.reason == "answers NotImplemented (status 501)"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreUnavailable) as away:
        open_store(f"s3://{BUCKET}/x", tmp_path / "cache").adapter_folder(DIGEST)
    assert away.value.reason == "does not answer"
