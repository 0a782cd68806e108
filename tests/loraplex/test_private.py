import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loraplex.api import connect
from loraplex.errors import BadSettings, NotPrivate
from loraplex.private import (
    SOCKET_PATH_LIMIT,
    make_private_folder,
    may_be_replaced,
    socket_folder,
    write_private,
)
from loraplex.roles.bootstrap import Keys, load_pepper
from loraplex.settings import Settings, load_settings


def test_a_private_file_is_replaced_as_a_whole(tmp_path: Path):
    path = tmp_path / "secret"
    write_private(path, "one")
    path.chmod(0o644)
    write_private(path, "two")
    assert path.read_text() == "two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


def test_a_folder_of_others_or_a_link_is_refused(tmp_path: Path):
    folder = make_private_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert make_private_folder(folder) == folder
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(NotPrivate):
        make_private_folder(tmp_path / "link")
    folder.chmod(0o750)
    with pytest.raises(NotPrivate, match="0700"):
        make_private_folder(folder)


NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another account")


@contextmanager
def as_nobody() -> Iterator[None]:
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@pytest.fixture
def place() -> Iterator[Path]:
    """A volume as Kubernetes mounts an emptyDir: root's, and all may write to it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@as_root
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_the_pepper_that_another_account_planted_is_refused(place: Path, mode: int):
    """Whatever lies there when the server starts, its keys would be hashed with it."""
    place.chmod(mode)
    settings = Settings(data_dir=place)
    with as_nobody():
        (place / "pepper").write_text("known to the planter")
    settings.make_home()
    with pytest.raises(NotPrivate, match=f"pepper is of user {NOBODY}"):
        load_pepper(settings)


@as_root
def test_a_planted_link_or_folder_is_refused(place: Path):
    (target := place / "target").write_text("a file of ours, to be read or written")
    for name in ("pepper", "keys.json", "serve.json", "imports.json"):
        (place / name).symlink_to(target)
    settings = Settings(data_dir=place)
    for read in (
        lambda: load_pepper(settings),
        lambda: Keys.read(place / "keys.json"),
        lambda: connect(settings),
    ):
        with pytest.raises(NotPrivate, match="is a link"):
            read()
    write_private(place / "serve.json", "ours")
    assert target.read_text() == "a file of ours, to be read or written"
    with as_nobody():
        (place / "store").mkdir()
    with pytest.raises(BadSettings, match=f"store belongs to user {NOBODY}"):
        settings.make_home()


@as_root
def test_a_data_directory_of_another_account_is_refused(place: Path):
    with as_nobody():
        (place / "of-nobody").mkdir(mode=0o777)
    with pytest.raises(BadSettings, match=r"data_dir: .*of-nobody belongs to user 65534"):
        Settings(data_dir=place / "of-nobody").make_home()


@as_root
def test_volumes_of_kubernetes_work(place: Path):
    """An emptyDir, and what fsGroup makes of a volume at the second start of a pod."""
    assert may_be_replaced(place)
    with as_nobody():
        settings = Settings(data_dir=place / "data")
        settings.make_home()
        assert not may_be_replaced(settings.home)
        pepper = load_pepper(settings)
        (settings.home / "pepper").chmod(0o660)
        settings.home.chmod(0o2770)
        settings.make_home()
        assert load_pepper(settings) == pepper and not may_be_replaced(settings.home)
        os.chmod(settings.home / "pepper", 0o666)
        with pytest.raises(NotPrivate, match="others can write"):
            load_pepper(settings)


def test_a_secret_that_is_named_as_a_file_may_be_a_link_as_in_kubernetes(tmp_path: Path):
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "pepper").write_text("from a secret\n")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "pepper").symlink_to("..data/pepper")
    named = {"LORAPLEX_KEY_PEPPER_FILE": str(tmp_path / "pepper")}
    assert load_pepper(load_settings({}, named)) == b"from a secret"


def test_sockets_of_a_long_path_lie_elsewhere():
    near = socket_folder(Path("/srv/x"), "worker.sock")
    assert near == Path("/srv/x/socket")
    far = [socket_folder(Path("/srv") / (letter * 120), "worker.sock") for letter in "xy"]
    assert far[0] != far[1]
    assert all(len(os.fsencode(folder / "worker.sock")) <= SOCKET_PATH_LIMIT for folder in far)
