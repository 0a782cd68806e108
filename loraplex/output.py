"""Output of the command line: tables or JSON on standard output, progress on standard error."""

from __future__ import annotations

import codecs
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

import click

from loraplex.errors import OutputLost
from loraplex.neutral_text import ExactText, NeutralText, neutral
from loraplex.tables import UNBOUNDED, Column, Kind, Row, exact, fields, fitted, printable, tabbed

log = logging.getLogger("loraplex")

ProgressCallback = Callable[[int, int], None]
"""Callback that gets the amount done and the total amount, in bytes unless stated otherwise."""


class _Output(io.FileIO):
    """Standard output. A failed write raises OutputLost, unlike a failed write to other files."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError as error:
            raise OutputLost from error
        except OSError as error:
            raise OutputLost(f"the output cannot be written: {error.strerror}") from error


def watch_output() -> None:
    """Makes all printed text harmless for a terminal. Makes failed writes to standard output raise
    OutputLost. If standard output is closed, all output is discarded."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _neutral(sys.stdout, _Output)
    else:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the end
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _neutral(sys.stderr, io.FileIO)


def _neutral(given: io.TextIOWrapper, kind: type[io.FileIO]) -> NeutralText:
    # If a file's encoding is ASCII, click would write to a file of its own instead.
    is_ascii = codecs.lookup(given.encoding).name == "ascii"
    return NeutralText(
        io.BufferedWriter(kind(given.fileno(), "w", closefd=False)),
        encoding="utf-8" if is_ascii else given.encoding,
        errors=given.errors,
        line_buffering=given.line_buffering or given.write_through,
    )


def print_answer(text: str) -> None:
    """Prints a part of a model's answer. On a terminal, the text is made harmless first. In a file
    or pipe, it is unchanged."""
    ExactText(sys.stdout).write(neutral(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


Form = Literal["json", "wide"]
"""Format of a command's output. A command without a format prints text that fits the terminal."""
_FORM = "loraplex.form"
"""Key under which a click context's `meta` stores the format."""


def set_form(context: click.Context, option: click.Parameter, is_on: bool) -> None:
    """Stores the output format if an option of the running command chooses one. --json takes
    precedence over --wide."""
    if is_on and not is_json():
        context.meta[_FORM] = option.name


def is_json() -> bool:
    """Returns whether the running command prints JSON."""
    return _form() == "json"


def _form() -> Form | None:
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(_FORM)


def show_list(rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """Prints the rows as JSON, or some of their fields as a table. On a terminal, prints the
    columns that fit. With --wide or to a pipe, prints all columns."""
    form = _form()
    if form == "json":
        print(json.dumps(rows, indent=2))
    elif form == "wide" or sys.stdout.isatty():
        width = UNBOUNDED if form == "wide" else _width()
        print("\n".join(fitted(rows, columns, width, datetime.now(UTC))))
    else:
        print("\n".join(tabbed(rows, columns)))


def show_one(record: Row, kinds: Mapping[str, Kind] | None = None) -> None:
    """Prints a record as JSON, or with one line for each field. `kinds` names the fields that are
    sizes or ages."""
    if is_json():
        print(json.dumps(record, indent=2))
    elif sys.stdout.isatty():
        print("\n".join(fields(record, _width(), datetime.now(UTC), kinds or {})))
    else:
        for name, value in record.items():
            print(f"{name}\t{printable(exact(value))}")


def show_done(answer: Row, sentence: str) -> None:
    """Prints the result of a change: the server's answer as JSON, or a sentence."""
    print(json.dumps(answer, indent=2) if is_json() else sentence)


def _width() -> int:
    """Returns the width of the terminal, or 80 if it is unknown."""
    return os.get_terminal_size(sys.stdout.fileno()).columns or 80


def tell(text: str) -> None:
    """Reports progress in the log if logging is set up, otherwise on standard error."""
    if logging.root.handlers:
        log.info(text)
    else:
        print(text, file=sys.stderr, flush=True)


def relay(name: str, line: str) -> None:
    """Prints a line of the output of a child process. Lines of a JSON log are printed unchanged."""
    if logging.root.handlers and line.startswith("{"):
        print(line, file=sys.stderr, flush=True)
    else:
        tell(f"{name}: {line}")


@contextmanager
def progress(what: str, then: str = "", *, of_bytes: bool = True) -> Iterator[ProgressCallback]:
    """Shows a progress bar on a terminal. Elsewhere, prints a line for each tenth of the work.
    Yields the callback that updates the progress. `then` is shown when everything is done."""
    if not sys.stderr.isatty() or logging.root.handlers:
        yield _tenths(what, then)
        return
    from rich import progress as rich

    from loraplex.neutral_console import NeutralConsole

    console = NeutralConsole(sys.stderr)
    amount = rich.DownloadColumn() if of_bytes else rich.MofNCompleteColumn()
    parts = (rich.TextColumn("{task.description}", markup=False), rich.BarColumn(), amount)
    with rich.Progress(*parts, rich.TimeRemainingColumn(), console=console) as bars:
        task = bars.add_task(what, total=None)

        def report(done: int, total: int) -> None:
            description = then if then and done >= total else what
            bars.update(task, completed=done, total=total, description=description)

        yield report


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Shows a spinner with the text `what` on a terminal. Each call of the yielded function shows a
    detail after `what`, in place of the previous detail. If standard error is not a terminal, there
    is no spinner, and each call prints a line with `what` and the detail."""
    if not sys.stderr.isatty():
        yield lambda detail: tell(f"{what}: {detail}")
        return
    from rich.text import Text

    from loraplex.neutral_console import NeutralConsole

    with NeutralConsole(sys.stderr).status(Text(what)) as status:
        yield lambda detail: status.update(Text(f"{what}: {detail}"))


def _tenths(what: str, then: str) -> ProgressCallback:
    """Returns a callback that prints a line for each tenth of the work, and `then` at the end."""
    last = 0

    def report(done: int, total: int) -> None:
        nonlocal last
        tenth = 10 * done // total if total else 10
        if tenth > last:
            last = tenth
            tell(f"{what}: {10 * tenth} %")
            if then and tenth == 10:
                tell(then)

    return report
