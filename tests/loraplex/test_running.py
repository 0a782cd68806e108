"""Servers of this account are found without settings, and believed only while they run."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from loraplex.api import connect, connect_tenant, with_store_of_server
from loraplex.errors import ApiFailure
from loraplex.roles.bootstrap import Keys
from loraplex.running import RunningServer, announced, find_server, running_servers, server_of
from loraplex.settings import Settings
from tests.preloaded import ROOT

ANNOUNCE = """
import signal, sys
from pathlib import Path
from loraplex.running import RunningServer, announced
url, folder = sys.argv[1:]
server = RunningServer(
    url=url, admin_url=url, management_url=url, pid=1, data_dir=Path(folder)
)
with announced(server):
    print("announced", flush=True)
    signal.pause()
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of an account that has no other servers, with the default data directory under tmp_path."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    return folder


def server(data_dir: Path, port: int) -> RunningServer:
    """With keys; nothing listens."""
    data_dir.mkdir(parents=True)
    url = f"http://127.0.0.1:{port}"
    Keys(f"lpx_admin_{port}", {"acme": f"lpx_acme_{port}"}).write(data_dir / "keys.json")
    return RunningServer(
        url=url, admin_url=f"{url}0", management_url=f"{url}0", pid=os.getpid(), data_dir=data_dir
    )


def test_the_one_server_is_found_wherever_its_data_lies(tmp_path: Path, runtime: Path) -> None:
    there = server(tmp_path / "elsewhere", 1)
    with announced(there):
        assert find_server(Settings()) == there
        with connect(Settings()) as api:
            assert api.url == there.admin_url
        assert with_store_of_server(Settings()).data_dir == there.data_dir
        with connect_tenant(Settings(), "acme") as api:
            assert api.url == there.url
        assert find_server(Settings(data_dir=tmp_path / "another")) is None
        for place in (there.data_dir / "serve.json", runtime / "loraplex"):
            assert stat.S_IMODE(place.stat().st_mode) & 0o077 == 0
    assert find_server(Settings()) is None
    assert list((runtime / "loraplex").iterdir()) == []
    with pytest.raises(ApiFailure, match=f"nothing serves from {tmp_path}/.loraplex"):
        connect(Settings())


def test_of_several_that_of_the_data_directory_is_taken_or_all_are_named(tmp_path: Path) -> None:
    usual = server(tmp_path / ".loraplex", 1)
    others = [server(tmp_path / name, port) for port, name in enumerate(("a", "b"), 2)]
    with ExitStack() as stack:
        for each in others:
            stack.enter_context(announced(each))
        with pytest.raises(ApiFailure) as refused:
            connect(Settings())
        for each in others:
            assert f"LORAPLEX_DATA_DIR={each.data_dir}  {each.url}" in str(refused.value)
            assert find_server(Settings(data_dir=each.data_dir)) == each
        with announced(usual):
            assert find_server(Settings()) == usual
            assert running_servers() == [usual, *others]


def test_a_url_gets_the_key_of_the_server_that_is_there(tmp_path: Path) -> None:
    there = server(tmp_path / "elsewhere", 1)
    with announced(there):
        for url in (there.url, f"{there.url}/", there.admin_url):
            with connect(Settings(url=url)) as api:
                assert api.url == there.admin_url
        with pytest.raises(ApiFailure, match="set LORAPLEX_KEY"):
            connect(Settings(url="http://127.0.0.1:9"))


def test_what_a_killed_server_left_is_not_believed(tmp_path: Path) -> None:
    """Its key would go to whatever listens there now."""
    there = server(tmp_path / "elsewhere", 1)
    command = [sys.executable, "-c", ANNOUNCE, there.url, str(there.data_dir)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "announced\n"
        assert find_server(Settings()) is not None
        process.send_signal(signal.SIGKILL)
    assert (there.data_dir / "serve.json").exists()
    assert server_of(there.data_dir) is None and running_servers() == []
    with pytest.raises(ApiFailure, match="set LORAPLEX_KEY"):
        connect(Settings(url=there.url))
    with announced(there):
        assert running_servers() == [there]


def test_a_folder_of_another_account_hides_servers_and_stops_none(
    tmp_path: Path, runtime: Path
) -> None:
    (runtime / "loraplex").mkdir(mode=0o777)
    (runtime / "loraplex").chmod(0o777)
    there = server(tmp_path / "elsewhere", 1)
    with announced(there):
        assert server_of(there.data_dir) == there
        assert find_server(Settings()) is None
