"""`loraplex doctor`: finds problems of a machine or a running server, and what to do."""

from __future__ import annotations

import sys
from typing import Any

import click

from loraplex.commands.command import Command
from loraplex.commands.options import (
    SERVING,
    TRANSPORT,
    UPLOADS,
    WORKING,
    settings_of,
    settings_options,
)
from loraplex.output import show_list
from loraplex.tables import Column, Kind

COLUMNS = (
    Column("state", "state", Kind.WORD),
    Column("check", "check", Kind.WORD),
    Column("found", "found", Kind.PROSE),
    Column("advice", "advice", Kind.PROSE),
)


@click.command("doctor", cls=Command, example="--data-dir /srv/loraplex", output="table")
@settings_options(SERVING, TRANSPORT, WORKING, UPLOADS)
def doctor_command(**flags: Any) -> None:
    """Check machine, compiler, disk, store, certificates, database, server and workers.

    Changes nothing. Exit codes: 0 no check failed, 1 a check failed, 2 wrong settings.
    """
    from loraplex.box.checkup import checkup

    found = [finding._asdict() for finding in checkup(settings_of(flags))]
    show_list(found, COLUMNS)
    if any(finding["state"] == "failed" for finding in found):
        sys.exit(1)
