"""What the command line prints: tables or JSON on standard output, progress on standard error."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from loraplex.errors import OutputLost

log = logging.getLogger("loraplex")

ProgressCallback = Callable[[int, int], None]
"""Called with what is done and how much it is in all; bytes if nothing else is said."""
UNBROKEN = 10_000
"""Columns of a table that goes into a file or a pipe."""


class _Output(io.FileIO):
    """Standard output. A failed write to it raises an error of its own, unlike one to another
    file."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError as error:
            raise OutputLost from error
        except OSError as error:
            raise OutputLost(f"the output cannot be written: {error.strerror}") from error


def watch_output() -> None:
    """From now on print and its like raise OutputLost; what is closed takes everything."""
    given = sys.stdout
    if not isinstance(given, io.TextIOWrapper):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the end
        return
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(given.fileno(), "w", closefd=False)),
        encoding=given.encoding,
        errors=given.errors,
        line_buffering=given.line_buffering or given.write_through,
    )


def show(
    rows: Sequence[dict[str, Any]], columns: Sequence[str], as_json: bool, title: str = ""
) -> None:
    """The rows as JSON, or some of their columns as a table."""
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for place, column in enumerate(columns):
        # The first names the row, and is copied into other commands.
        table.add_column(column, overflow="fold", no_wrap=place == 0)
    for row in rows:
        table.add_row(*(Text(_plain(_text(row.get(column)))) for column in columns))
    Console(width=None if sys.stdout.isatty() else UNBROKEN).print(table)


def tell(text: str) -> None:
    """A line about what goes on; in the log where there is one."""
    if logging.root.handlers:
        log.info(text)
    else:
        print(text, file=sys.stderr, flush=True)


def relay(name: str, line: str) -> None:
    """A line that a child has written: an object of its log stays as it is in ours."""
    if logging.root.handlers and line.startswith("{"):
        print(line, file=sys.stderr, flush=True)
    else:
        tell(f"{name}: {line}")


@contextmanager
def progress(what: str, then: str = "") -> Iterator[ProgressCallback]:
    """A bar on a terminal, a line each tenth elsewhere; `then` is what goes on at its end."""
    if not sys.stderr.isatty() or logging.root.handlers:
        yield _Lines(what, then)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    words = TextColumn("{task.description}", markup=False)
    parts = (words, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bars(*parts, console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=None)

        def report(done: int, total: int) -> None:
            description = then if then and done >= total else what
            bars.update(task, completed=done, total=total, description=description)

        yield report


@contextmanager
def counting(what: str) -> Iterator[ProgressCallback]:
    """As `progress`, of things that are not bytes."""
    if not sys.stderr.isatty():
        yield _Lines(what, "")
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bars(*parts, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, a line for each change elsewhere; called with what it waits for."""
    if not sys.stderr.isatty():
        yield lambda detail: tell(f"{what}: {detail}")
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(what)) as status:
        yield lambda detail: status.update(Text(f"{what}: {detail}"))


class _Lines:
    def __init__(self, what: str, then: str) -> None:
        self._what = what
        self._then = then
        self._tenth = 0

    def __call__(self, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 10
        if tenth > self._tenth:
            self._tenth = tenth
            tell(f"{self._what}: {10 * tenth} %")
            if self._then and tenth == 10:
                tell(self._then)


def _plain(text: str) -> str:
    """Tenants wrote some of it: nothing that a terminal would act on."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _text(value: Any) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.5g}"
        case dict():
            return ", ".join(f"{key}={item}" for key, item in value.items())
        case list():
            return ", ".join(str(item) for item in value)
        case _:
            return str(value)
