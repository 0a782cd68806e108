"""The servers of this account that run on this machine, found without settings.

`serve` writes where it listens into `serve.json` of its data directory, and links that directory in
a folder of the account. It keeps the file locked while it runs: one without a lock was left by a
server that was killed, and is not believed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from loraplex.errors import ApiFailure, BadSettings, LoraplexError
from loraplex.private import (
    is_locked,
    make_private_folder,
    path_digest,
    read_private,
    write_locked,
)
from loraplex.settings import Settings


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    """Where a `serve` listens. `data_dir` has its keys, in `keys.json`."""

    url: str
    admin_url: str
    management_url: str
    pid: int
    data_dir: Path = Path()
    """The folder that the file was found in, wherever it was moved to."""


@contextmanager
def announced(server: RunningServer) -> Iterator[None]:
    """Lets commands of this account find the server until the end of the block.

    Without a private folder for the account it is found by its data directory alone."""
    path, link = server.data_dir / "serve.json", None
    where = msgspec.structs.asdict(server)
    del where["data_dir"]
    descriptor = write_locked(path, json.dumps(where) + "\n")
    try:
        with suppress(LoraplexError, OSError):
            link = _link(server.data_dir)
        yield
    finally:
        if link is not None:
            link.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        os.close(descriptor)


def find_server(settings: Settings) -> RunningServer | None:
    """The server that commands speak to where no URL is set: that of the data directory; for the
    default directory, else the only one of this account. Raises ApiFailure if there are several."""
    if (own := server_of(settings.home)) is not None:
        return own
    if settings.data_dir != Settings().data_dir:
        return None
    found = running_servers()
    if len(found) > 1:
        listed = "\n".join(f"  LORAPLEX_DATA_DIR={each.data_dir}  {each.url}" for each in found)
        raise ApiFailure(f"several servers run here; choose one by its variable:\n{listed}")
    return found[0] if found else None


def find_server_at(settings: Settings, url: str) -> RunningServer | None:
    """The server of this account that listens at this URL."""
    known = [server_of(settings.home), *running_servers()]
    return next((each for each in known if each and url in (each.url, each.admin_url)), None)


def running_servers() -> list[RunningServer]:
    """All servers of this account on this machine, by their URLs."""
    found: list[RunningServer] = []
    # A folder of another account, or a directory that has gone, is no server of ours.
    with suppress(LoraplexError, OSError):
        folder = _folder()
        for link in folder.iterdir() if folder.exists() else ():
            with suppress(LoraplexError, OSError):
                server = server_of(link.readlink())
                found += [server] if server else []
    return sorted(found, key=lambda server: server.url)


def server_of(data_dir: Path) -> RunningServer | None:
    """The server that runs on a data directory. Raises BadSettings, and NotPrivate for the file of
    another account."""
    path = data_dir / "serve.json"
    try:
        server = msgspec.json.decode(read_private(path), type=RunningServer)
        if not is_locked(path):
            return None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadSettings(f"{path}: {error}") from None
    return msgspec.structs.replace(server, data_dir=data_dir)


def _link(data_dir: Path) -> Path:
    """The account's link to the data directory."""
    link = make_private_folder(_folder()) / path_digest(data_dir)
    link.unlink(missing_ok=True)
    link.symlink_to(data_dir)
    return link


def _folder() -> Path:
    """The same in every shell of the account, and empty after a restart of the machine."""
    standard = Path(f"/run/user/{os.geteuid()}")
    for place in (Path(os.environ.get("XDG_RUNTIME_DIR") or standard), standard):
        # After `su` the variable may still name the folder of another account.
        if place.is_dir() and place.stat().st_uid == os.geteuid():
            return place / "loraplex"
    return Path(tempfile.gettempdir()) / f"loraplex-{os.geteuid()}"
