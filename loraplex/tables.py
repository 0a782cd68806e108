"""Rows as lines of text: a table as wide as a terminal, or fields between tabs for a pipe.

A terminal shows sizes and ages for people, and as many columns as it has room for, the most
important first. A pipe gets every column with exact values and nothing padded.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size

GAP = 2
ELLIPSIS = "…"
UNBOUNDED = 1 << 20
"""Columns of a table that nothing bounds."""

Row = dict[str, Any]


class Kind(Enum):
    """What a column holds, which decides how it is shown and what it loses when room is short."""

    NAME = "name"
    """Shortened in the middle: its head and its end tell it from others."""
    ID = "id"
    """As a name; its length is always the same, and less of it tells enough."""
    WORD = "word"
    """One of a few: whole."""
    TEXT = "text"
    """Shortened at its end."""
    PROSE = "prose"
    """Goes on in the next line."""
    NUMBER = "number"
    SIZE = "size"
    """Bytes."""
    AGE = "age"
    """A moment as RFC 3339 writes it; so are the next ones."""
    DAY = "day"
    HOUR = "hour"


LEAST = {Kind.NAME: 16, Kind.ID: 12, Kind.TEXT: 16, Kind.PROSE: 20}
"""Cells that a column may be shortened to; the other kinds stay whole."""


class Size(int):
    """Bytes in a column of numbers that are not all bytes."""


class Column(NamedTuple):
    key: str
    head: str
    kind: Kind = Kind.TEXT


class _Laid(NamedTuple):
    """A column with its cells."""

    column: Column
    cells: list[str]
    natural: int
    """Cells of a terminal that the widest needs."""
    least: int


def tabbed(rows: Sequence[Row], columns: Sequence[Column]) -> Iterator[str]:
    """A line a row and one of heads, for programs that read fields between tabs."""
    yield "\t".join(column.head for column in columns)
    for row in rows:
        yield "\t".join(printable(exact(row.get(column.key))) for column in columns)


def fitted(
    rows: Sequence[Row], columns: Sequence[Column], width: int, now: datetime
) -> Iterator[str]:
    """A table of lines that are at most `width` cells; its last line names the columns that found
    no room. Columns without a value are left out."""
    if not rows:
        yield "(none)"
        return
    laid = [_lay(column, rows, now) for column in columns]
    # The first names the row, and is copied into other commands.
    laid[0] = laid[0]._replace(least=min(laid[0].natural, width, 20))
    laid = [each for place, each in enumerate(laid) if place == 0 or any(each.cells)]
    shown = list(laid)
    while len(shown) > 1 and sum(each.least + GAP for each in shown) - GAP > width:
        shown.pop()
    widths = _share(shown, width)
    heads = [each.column.head.upper() for each in shown]
    yield _line(shown, heads, widths)
    for place in range(len(rows)):
        cells = [
            _folded(each, each.cells[place], room) for each, room in zip(shown, widths, strict=True)
        ]
        for number in range(max(map(len, cells))):
            line = [lines[number] if number < len(lines) else "" for lines in cells]
            yield _line(shown, line, widths)
    if missing := [each.column.head for each in laid[len(shown) :]]:
        hint = f"(no room for {', '.join(missing)}: --wide)"
        yield from textwrap.wrap(hint, max(width, 20), subsequent_indent=" ")


def fields(record: Row, width: int, now: datetime, kinds: Mapping[str, Kind]) -> Iterator[str]:
    """A line a field, its lines under each other where it has several. Fields without a value are
    left out."""
    shown = {
        name.replace("_", " "): text
        for name, value in record.items()
        if name != "object" and (text := _told(value, kinds.get(name, Kind.PROSE), now))
    }
    indent = max(map(cell_len, shown), default=0) + GAP
    room = max(width - indent, 20)
    for name, text in shown.items():
        first, *rest = [part for line in text.split("\n") for part in _fold(printable(line), room)]
        yield f"{set_cell_size(name, indent)}{first}".rstrip()
        for line in rest:
            yield f"{' ' * indent}{line}".rstrip()


def _told(value: Any, kind: Kind, now: datetime) -> str:
    """As `human`; of several things each in a line."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "\n".join(exact(item) for item in value)
    return human(value, kind, now)


def human(value: Any, kind: Kind, now: datetime) -> str:
    if value is None:
        return ""
    if kind is Kind.AGE:
        return age(datetime.fromisoformat(value), now)
    if kind in (Kind.DAY, Kind.HOUR):
        digits = "%Y-%m-%d" if kind is Kind.DAY else "%Y-%m-%d %H:%M"
        return datetime.fromisoformat(value).astimezone(UTC).strftime(digits)
    if kind is Kind.SIZE or isinstance(value, Size):
        return size(int(value))
    return exact(value)


def exact(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.5g}"
        case dict():
            told = {key: exact(item) for key, item in value.items()}
            return ", ".join(f"{key}={item}" for key, item in told.items() if item)
        case list():
            gap = "; " if any(isinstance(item, dict) for item in value) else ", "
            return gap.join(exact(item) for item in value)
        case _:
            return str(value)


def size(num_bytes: int) -> str:
    """Such as 512 B, 64 KiB or 1.2 GiB."""
    amount, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        # What would be rounded to 1024 is one of the next unit.
        if round(abs(amount), 1) < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.1f}".removesuffix(".0") + f" {unit}"


def age(moment: datetime, now: datetime) -> str:
    """Such as 3 min ago or in 2 days; the date of what is more than 60 days away."""
    away = moment - now
    if abs(away) > timedelta(days=60):
        return moment.astimezone(UTC).date().isoformat()
    seconds = int(abs(away).total_seconds())
    for unit, span in (("day", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= span:
            number = seconds // span
            words = f"{number} {unit}{'s' if unit == 'day' and number > 1 else ''}"
            return f"in {words}" if away > timedelta(0) else f"{words} ago"
    return "now"


def printable(text: str) -> str:
    """Others wrote some of it: nothing that a terminal would act on, and no line of its own."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _lay(column: Column, rows: Sequence[Row], now: datetime) -> _Laid:
    cells = [human(row.get(column.key), column.kind, now) for row in rows]
    if column.kind is Kind.PROSE:
        cells = ["\n".join(map(printable, cell.split("\n"))) for cell in cells]
    else:
        cells = [printable(cell) for cell in cells]
    widest = max((cell_len(line) for cell in cells for line in cell.split("\n")), default=0)
    natural = max(widest, len(column.head))
    least = max(len(column.head), min(natural, LEAST.get(column.kind, natural)))
    return _Laid(column, cells, natural, least)


def _share(laid: Sequence[_Laid], width: int) -> list[int]:
    """The width of each column: the least, and what is left goes to the first ones."""
    left = width - sum(each.least + GAP for each in laid) + GAP
    widths: list[int] = []
    for each in laid:
        more = max(0, min(each.natural - each.least, left))
        left -= more
        widths.append(each.least + more)
    return widths


def _folded(laid: _Laid, cell: str, room: int) -> list[str]:
    """The lines that a cell takes."""
    if laid.column.kind is Kind.PROSE:
        return [part for line in cell.split("\n") for part in _fold(line, room)]
    return [_shortened(cell, room, in_the_middle=laid.column.kind in (Kind.ID, Kind.NAME))]


def _fold(line: str, room: int) -> list[str]:
    return textwrap.wrap(line, room, break_on_hyphens=False) or [""]


def _shortened(text: str, room: int, *, in_the_middle: bool) -> str:
    if cell_len(text) <= room:
        return text
    end = (room - 1) // 2 if in_the_middle else 0
    tail = set_cell_size(text[::-1], end)[::-1]
    return set_cell_size(text, room - 1 - end) + ELLIPSIS + tail


def _line(laid: Sequence[_Laid], cells: Sequence[str], widths: Sequence[int]) -> str:
    parts: list[str] = []
    for each, cell, room in zip(laid, cells, widths, strict=True):
        padding = " " * (room - cell_len(cell))
        is_number = each.column.kind in (Kind.NUMBER, Kind.SIZE)
        parts.append(padding + cell if is_number else cell + padding)
    return (" " * GAP).join(parts).rstrip()
