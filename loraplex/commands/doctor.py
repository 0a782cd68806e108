"""`loraplex doctor`: what is wrong with a machine or a running server, and what to do."""

from __future__ import annotations

import sys
from typing import Any

import click

from loraplex.commands.options import (
    SERVING,
    TRANSPORT,
    UPLOADS,
    WORKING,
    json_option,
    settings_of,
    settings_options,
)
from loraplex.output import show

COLUMNS = ("check", "state", "found", "advice")


@click.command("doctor")
@json_option
@settings_options(SERVING, TRANSPORT, WORKING, UPLOADS)
def doctor_command(as_json: bool, **flags: Any) -> None:
    """Check machine, compiler, disk, store, certificates, database, server and workers.

    Changes nothing. Exit codes: 0 nothing failed, 1 a check failed, 2 wrong settings.
    """
    from loraplex.box.checkup import checkup

    found = [finding._asdict() for finding in checkup(settings_of(flags))]
    show(found, COLUMNS, as_json)
    if any(finding["state"] == "failed" for finding in found):
        sys.exit(1)
