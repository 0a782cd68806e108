import os
import stat
from pathlib import Path

import pytest

from loraplex.errors import NotPrivate
from loraplex.private import SOCKET_PATH_LIMIT, make_private_folder, socket_folder, write_private


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


def test_sockets_of_a_long_path_lie_elsewhere():
    near = socket_folder(Path("/srv/x"), "worker.sock")
    assert near == Path("/srv/x/socket")
    far = [socket_folder(Path("/srv") / (letter * 120), "worker.sock") for letter in "xy"]
    assert far[0] != far[1]
    assert all(len(os.fsencode(folder / "worker.sock")) <= SOCKET_PATH_LIMIT for folder in far)
