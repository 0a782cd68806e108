"""Finds the running servers of this account on this machine, even if the settings do not name them.

`serve` writes its addresses to `serve.json` in its data directory, and links that directory in a
folder of the account. It locks the file while it runs: a file without a lock was left by a server
that was killed, and is ignored.
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
    """Addresses of a running `serve`. Its keys are in `data_dir`/keys.json."""

    url: str
    admin_url: str
    management_url: str
    pid: int
    data_dir: Path = Path()
    """Folder in which `serve.json` was found, which may have been moved since it was written."""


@contextmanager
def announced(server: RunningServer) -> Iterator[None]:
    """Lets commands of this account find the server until the end of the block.

    If the account has no private folder for links, the server can be found only by its data
    directory.
    """
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
    """Returns the server that commands use if the settings have no URL, or None. This is the server
    that runs on the data directory. If the data directory is the default one and no server runs on
    it, this is the account's only other server. Raises ApiFailure if the account has several
    others."""
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
    """Returns this account's server on this machine at this URL, or None."""
    known = [server_of(settings.home), *running_servers()]
    return next((each for each in known if each and url in (each.url, each.admin_url)), None)


def running_servers() -> list[RunningServer]:
    """Returns all servers of this account on this machine, sorted by their URLs."""
    found: list[RunningServer] = []
    # A folder of another account, or a data directory that was deleted, has no server of this
    # account.
    with suppress(LoraplexError, OSError):
        folder = _folder()
        for link in folder.iterdir() if folder.exists() else ():
            with suppress(LoraplexError, OSError):
                server = server_of(link.readlink())
                found += [server] if server else []
    return sorted(found, key=lambda server: server.url)


def server_of(data_dir: Path) -> RunningServer | None:
    """Returns the server that runs on a data directory, or None. Raises BadSettings if its file
    `serve.json` is invalid, and NotPrivate if another account owns the file."""
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
    """Creates and returns the account's link to the data directory."""
    link = make_private_folder(_folder()) / path_digest(data_dir)
    link.unlink(missing_ok=True)
    link.symlink_to(data_dir)
    return link


def _folder() -> Path:
    """Returns the user's folder with a link to the data directory of each running server."""
    standard = Path(f"/run/user/{os.geteuid()}")
    for place in (Path(os.environ.get("XDG_RUNTIME_DIR") or standard), standard):
        # After `su`, XDG_RUNTIME_DIR may still name the folder of another account.
        if place.is_dir() and place.stat().st_uid == os.geteuid():
            return place / "loraplex"
    return Path(tempfile.gettempdir()) / f"loraplex-{os.geteuid()}"
