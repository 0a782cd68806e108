"""A primary PostgreSQL server and a streaming standby of it, for tests of fail-overs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from loraplex.box.postgres import EmbeddedPostgres
from tests.postgres import SETTINGS, initialise, own_server, temporary_home


@contextmanager
def primary_and_standby() -> Iterator[tuple[EmbeddedPostgres, EmbeddedPostgres]]:
    """Two running servers with one password, the second of which replays what the first writes."""
    with own_server(SETTINGS) as primary, temporary_home() as home:
        standby = EmbeddedPostgres(home / "data", root_home=home, settings=SETTINGS)
        initialise(standby, home / "data")
        shutil.rmtree(standby.cluster)
        command = [str(primary._bin / "pg_basebackup"), "-d", primary.dsn()]
        done = standby._run([*command, "-D", str(standby.cluster), "-R", "-c", "fast"])
        assert done.returncode == 0, done.stderr
        with standby:
            yield primary, standby
