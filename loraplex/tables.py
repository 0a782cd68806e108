"""Formats rows as text: a table as wide as the terminal, or tab-separated fields for a pipe.

On a terminal, sizes and ages are readable, and as many columns are shown as fit, the most important
ones first. A pipe gets every column, with exact values and no padding.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size

GAP = 2
ELLIPSIS = "…"
UNBOUNDED = 1 << 20
"""Width of a table that need not fit a terminal."""

Row = dict[str, Any]


class Kind(Enum):
    """Kind of a column. It decides how the column's values are shown and shortened."""

    NAME = "name"
    """Name, which is shortened in the middle, because names differ at both ends."""
    ID = "id"
    """Id, which is shortened in the middle, to fewer characters than a name."""
    WORD = "word"
    """Word, which is never shortened."""
    TEXT = "text"
    """Text, which is shortened at its end, between two words."""
    PROSE = "prose"
    """Text, which is wrapped to several lines."""
    NUMBER = "number"
    SIZE = "size"
    """Number of bytes."""
    DOLLARS = "dollars"
    AGE = "age"
    """Time in RFC 3339 form, shown as an age. Values of DAY and HOUR have the same form."""
    DAY = "day"
    HOUR = "hour"


LEAST = {Kind.NAME: 16, Kind.ID: 12, Kind.TEXT: 16, Kind.PROSE: 20}
"""Minimum cells to which a column is shortened, by its kind. Other kinds are never shortened."""


class Size(int):
    """Number of bytes, in a column that also contains numbers that are not bytes."""


class Dollars(str):
    """Amount of money, in a column that also contains other numbers."""


class Column(NamedTuple):
    key: str
    head: str
    kind: Kind = Kind.TEXT


class _Laid(NamedTuple):
    """Column with its formatted cells."""

    column: Column
    cells: list[str]
    natural: int
    """Number of cells that the widest value needs."""
    least: int


def tabbed(rows: Sequence[Row], columns: Sequence[Column]) -> Iterator[str]:
    """Yields a line of heads and one line for each row, with tabs between the fields."""
    yield "\t".join(column.head for column in columns)
    for row in rows:
        yield "\t".join(printable(exact(row.get(column.key))) for column in columns)


def fitted(
    rows: Sequence[Row], columns: Sequence[Column], width: int, now: datetime
) -> Iterator[str]:
    """Yields the lines of a table of at most `width` cells. The last line names the columns that do
    not fit. Columns without values are omitted."""
    if not rows:
        yield "(none)"
        return
    laid = [_lay(column, rows, now) for column in columns]
    # The first column is shortened less, because it identifies the row and is copied into other
    # commands.
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
    """Yields a line for each field with a value. Further lines of a value are indented."""
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
    """Formats a value. A list of objects gets one line for each item."""
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
    if kind is Kind.DOLLARS or isinstance(value, Dollars):
        return f"${value}"
    return exact(value)


def exact(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            # The number is never written in scientific notation.
            return f"{value:.0f}" if abs(value) >= 1e5 else f"{Decimal(f'{value:.5g}'):f}"
        case dict():
            told = {key: _enclosed(item) for key, item in value.items()}
            return ", ".join(f"{key}={item}" for key, item in told.items() if item)
        case list():
            gap = "; " if any(isinstance(item, dict) for item in value) else ", "
            return gap.join(exact(item) for item in value)
        case _:
            return str(value)


def _enclosed(value: Any) -> str:
    """Formats a value inside a value, with parentheses around a list or dict of several items."""
    text = exact(value)
    return f"({text})" if text and isinstance(value, dict | list) and len(value) > 1 else text


def size(num_bytes: int) -> str:
    """Formats bytes, such as 512 B, 64 KiB or 1.2 GiB."""
    amount, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        # A value that would be rounded to 1024 uses the next unit instead.
        if round(abs(amount), 1) < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.1f}".removesuffix(".0") + f" {unit}"


def age(moment: datetime, now: datetime) -> str:
    """Formats a time relative to now, such as 3 min ago or in 2 days. A time more than 60 days away
    is formatted as a date."""
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


def wrapped(text: str, width: int, indent: str = "  ") -> str:
    """Returns the text with its lines wrapped at words, and continued lines indented. Paths and
    other long words stay whole. Spaces in a line stay as they are."""
    style: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    style |= {"subsequent_indent": indent, "replace_whitespace": False}
    return "\n".join(textwrap.fill(line, width, **style) for line in text.split("\n"))


def printable(text: str) -> str:
    """Escapes line breaks and characters on which a terminal acts, because the text may come from
    other users."""
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
    """Returns the columns' widths: each minimum, and the remaining cells for the first columns."""
    left = width - sum(each.least + GAP for each in laid) + GAP
    widths: list[int] = []
    for each in laid:
        more = max(0, min(each.natural - each.least, left))
        left -= more
        widths.append(each.least + more)
    return widths


def _folded(laid: _Laid, cell: str, room: int) -> list[str]:
    """Returns the lines of a table cell."""
    if laid.column.kind is Kind.PROSE:
        return [part for line in cell.split("\n") for part in _fold(line, room)]
    return [shortened(cell, room, in_the_middle=laid.column.kind in (Kind.ID, Kind.NAME))]


def _fold(line: str, room: int) -> list[str]:
    return textwrap.wrap(line, room, break_on_hyphens=False) or [""]


def shortened(text: str, room: int, *, in_the_middle: bool = True) -> str:
    """Shortens a text to a number of cells. If `in_the_middle` is set, removes the middle, because
    names differ at both ends. Otherwise cuts the end, between two words if possible."""
    if cell_len(text) <= room:
        return text
    end = (room - 1) // 2 if in_the_middle else 0
    if not in_the_middle and (space := text.rfind(" ", room // 2, room)) > 0:
        return text[:space] + ELLIPSIS
    tail = set_cell_size(text[::-1], end)[::-1]
    return set_cell_size(text, room - 1 - end) + ELLIPSIS + tail


def _line(laid: Sequence[_Laid], cells: Sequence[str], widths: Sequence[int]) -> str:
    parts: list[str] = []
    for each, cell, room in zip(laid, cells, widths, strict=True):
        padding = " " * (room - cell_len(cell))
        is_number = each.column.kind in (Kind.NUMBER, Kind.SIZE, Kind.DOLLARS)
        parts.append(padding + cell if is_number else cell + padding)
    return (" " * GAP).join(parts).rstrip()
