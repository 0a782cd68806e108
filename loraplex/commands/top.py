"""Commands `loraplex top` and `loraplex status`, which show workers, models and tenants with their
load: `top` continuously, `status` once."""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import termios
import threading
import tty
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from loraplex.commands.command import Command
from loraplex.commands.options import api, route
from loraplex.errors import ApiFailure
from loraplex.output import is_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from loraplex.api import Api
    from loraplex.commands.overview_screen import Order

PIPE_WIDTH = 160
"""Width of a screen printed to a file or pipe, unless COLUMNS is set."""
AROUND_ROWS = 24
"""Approximate number of lines of a live screen outside of its three tables."""
QUIT = ("q", "\x03", "\x04")


@click.command("top", cls=Command, example="--interval 1", output="text")
@click.option("--once", is_flag=True, help="Print one screen and exit.")
@click.option(
    "--interval",
    type=click.FloatRange(0.5, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between updates.",
)
def top_command(once: bool, interval: float) -> None:
    """Watch workers, models, tenants, memory, latencies and refusals. Needs an admin key.

    Keys: t, m, w, l and n sort by tokens, memory, waiting, latency and name; q exits.
    """
    if once or not sys.stdout.isatty():
        _print(api())
    else:
        _Live(api(), interval).run()


@click.command("status", cls=Command, example="")
def status_command() -> None:
    """Show workers, models, adapters, load and recent errors on one screen. Needs an admin key."""
    if is_json():
        print(json.dumps(api().get(route("overview")), indent=2))
    else:
        _print(api())


def _print(server: Api) -> None:
    from loraplex.commands.overview_screen import draw
    from loraplex.neutral_console import NeutralConsole

    overview = server.get(route("overview"))
    width = shutil.get_terminal_size((PIPE_WIDTH, 0)).columns
    console = NeutralConsole(sys.stdout, width=width)
    with console.capture() as captured:
        console.print(draw(overview, title=_title(server), width=console.width))
    # Removes trailing spaces, with which columns are padded.
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _title(server: Api) -> str:
    return f"loraplex on {server.url}"


class _Live:
    """Live screen. A thread fetches the overview, so that keys work while the server is slow."""

    def __init__(self, server: Api, interval: float) -> None:
        self._server = server
        self._interval = interval
        self._overview: dict[str, Any] = server.get(route("overview"))
        self._failure = ""
        """Reason for which the last fetch failed, or empty after a success. After a failure, the
        screen shows the previous overview."""
        self._news, self._has_news = os.pipe()
        self._stopping = threading.Event()

    def run(self) -> None:
        from rich.live import Live

        from loraplex.commands.overview_screen import ORDERS
        from loraplex.neutral_console import NeutralConsole

        console = NeutralConsole(sys.stdout)
        order = ORDERS[0]
        by_key = {each.key: each for each in ORDERS}
        looking = threading.Thread(target=self._look, daemon=True)
        with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            looking.start()
            inputs = [self._news, *([] if keys is None else [keys])]
            while True:
                live.update(self._screen(order, live.console.size), refresh=True)
                ready, _, _ = select.select(inputs, [], [])
                if self._news in ready:
                    os.read(self._news, 1)
                if keys is not None and keys in ready:
                    key = os.read(keys, 1).decode("latin-1")
                    if not key or key in QUIT:
                        self._stopping.set()
                        return
                    order = by_key.get(key, order)

    def _look(self) -> None:
        while not self._stopping.wait(self._interval):
            try:
                self._overview, self._failure = self._server.get(route("overview")), ""
            except ApiFailure as failure:
                self._failure = str(failure)
            os.write(self._has_news, b".")

    def _screen(self, order: Order, size: tuple[int, int]) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from loraplex.commands.overview_screen import ORDERS, draw

        width, height = size
        rows = max((height - AROUND_ROWS) // 3, 2)
        keys = "  ".join(f"{each.key} {each.name}" for each in ORDERS)
        head = self._failure or f"sorted by {order.name}   {keys}   q quit"
        return Group(
            Text(head, style="bold red" if self._failure else "dim"),
            draw(
                self._overview, title=_title(self._server), width=width, order=order, max_rows=rows
            ),
        )


@contextmanager
def _keys() -> Generator[int | None]:
    """Yields the file descriptor of single key presses, or None if there is no terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
