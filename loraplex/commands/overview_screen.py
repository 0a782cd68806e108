"""Screen of `loraplex top` and `loraplex status`: an overview from the admin plane as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loraplex.tables import Row, age, printable, shortened, size

WIDE = 120
"""Minimum terminal width at which tables show all columns."""
NAME_CELLS = 24
"""Maximum cells of a name."""
STYLES = {"ready": "green", "draining": "yellow", "lost": "red", "unreached": "red"}
STYLES |= {"unsatisfiable": "red"}


class Order(NamedTuple):
    """Order of a table's rows, and the key that selects this order."""

    key: str
    name: str
    value: Callable[[Row], Any]
    """Sort key. Rows with smaller values come first."""


def _latency(row: Row) -> float:
    times = row.get("ttft") or row.get("itl")
    return -times["p99"] if times else 0.0


ORDERS = (
    Order("t", "tokens", lambda row: -_tokens(row)),
    Order("m", "memory", lambda row: -_memory(row)),
    Order("w", "waiting", lambda row: -row.get("num_waiting", 0)),
    Order("l", "latency", _latency),
    Order("n", "name", lambda row: row.get("name") or row["id"]),
)


class Column(NamedTuple):
    title: str
    text: Callable[[Row], str]
    is_wide: bool = False
    """Whether the column is shown only if the terminal is at least `WIDE` cells wide."""
    is_number: bool = True


def draw(
    overview: Row, *, title: str, width: int, order: Order = ORDERS[0], max_rows: int = 50
) -> RenderableType:
    """Returns the screen. `max_rows` is the maximum number of rows in each table."""
    parts: list[RenderableType] = [_summary(overview, title)]
    for name, rows, columns in (
        ("models", overview["models"], MODELS),
        ("workers", overview["workers"], WORKERS),
        ("tenants", overview["tenants"], TENANTS),
    ):
        if rows:
            ordered = sorted(rows, key=order.value)[:max_rows]
            left = len(rows) - len(ordered)
            parts += [Text(), _table(name, ordered, columns, width)]
            if left:
                parts.append(Text(f"and {left} more {name}", style="dim"))
    if overview["refusals"]:
        counts = list(overview["refusals"].items())[:max_rows]
        parts += [Text(), Text("refusals of the last minute", style="bold")]
        parts += [Text(", ".join(f"{number} {reason}" for reason, number in counts))]
    if overview["troubles"]:
        parts += [Text(), Text("errors", style="bold")]
        now = datetime.fromisoformat(overview["at"])
        for trouble in overview["troubles"][:max_rows]:
            parts.append(Text(_trouble(trouble, now), no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _summary(overview: Row, title: str) -> Text:
    states = [worker["state"] for worker in overview["workers"]]
    workers = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    lines = [
        title,
        f"workers: {workers or 'none'}  gateways: {overview['num_gateways']}"
        f"  tenants: {overview['num_tenants']}  adapters: {overview['num_adapters']}",
        f"requests: {overview['requests_in_flight']} in flight,"
        f" {_rate(overview['requests_per_s'])}/s"
        f"   tokens/s: {_rate(overview['prompt_tokens_per_s'])} in,"
        f" {_rate(overview['completion_tokens_per_s'])} out",
        f"TTFT: {_percentiles(overview['ttft'])}   ITL: {_percentiles(overview['itl'])}",
    ]
    return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


def _table(name: str, rows: Iterable[Row], columns: Sequence[Column], width: int) -> Table:
    shown = [column for column in columns if width >= WIDE or not column.is_wide]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(shown):
        table.add_column(
            name if place == 0 else column.title,
            justify="right" if column.is_number else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in rows:
        style = STYLES.get(row.get("state", ""))
        cells = [Text(printable(column.text(row))) for column in shown]
        if style:
            cells[1].stylize(style)
        table.add_row(*cells)
    return table


def _tokens(row: Row) -> float:
    """Returns the tokens per second of a row."""
    if "tokens_per_s" in row:
        return row["tokens_per_s"]
    return row["prompt_tokens_per_s"] + row["completion_tokens_per_s"]


def _memory(row: Row) -> int:
    if "memory" in row:
        return sum(number for kind, number in row["memory"].items() if kind != "free")
    return row.get("kv_bytes", 0) + row.get("adapter_bytes", 0)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value else "0"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def _percentiles(times: Row | None) -> str:
    if times is None:
        return "-"
    return ", ".join(f"{name} {_seconds(times[name])}" for name in ("p50", "p95", "p99"))


def _percentile(times: str, name: str) -> Callable[[Row], str]:
    return lambda row: _seconds(row[times][name]) if row[times] else "-"


def _held(row: Row, tier: str) -> str:
    held = row["adapters"][tier]
    return f"{held['number']} ({size(held['bytes'])})" if held["number"] else "0"


def _cached(row: Row) -> str:
    if not row["prompt_tokens_per_s"]:
        return "-"
    return f"{row['cached_tokens_per_s'] / row['prompt_tokens_per_s']:.0%}"


def _trouble(trouble: Row, now: datetime) -> str:
    words = [_name(trouble["place"]), trouble["code"]]
    if trouble["message"]:
        words.append(trouble["message"])
    if trouble["at"] is not None:
        words.insert(0, age(datetime.fromisoformat(trouble["at"]), now))
        words.append(f"({trouble['number']} times, last {trouble['request_id'] or 'unnamed'})")
    return printable("  ".join(words))


def _name(name: str) -> str:
    return shortened(name, NAME_CELLS)


MODELS = (
    Column("", lambda row: _name(row["name"]), is_number=False),
    Column("on", lambda row: str(row["num_on_device"])),
    Column("run", lambda row: str(row["num_running"])),
    Column("wait", lambda row: str(row["num_waiting"])),
    Column("req/s", lambda row: _rate(row["requests_per_s"]), is_wide=True),
    Column("failed", lambda row: str(row["failed"]), is_wide=True),
    Column("in/s", lambda row: _rate(row["prompt_tokens_per_s"])),
    Column("cached", _cached, is_wide=True),
    Column("out/s", lambda row: _rate(row["completion_tokens_per_s"])),
    Column("TTFT p50", _percentile("ttft", "p50"), is_wide=True),
    Column("TTFT p99", _percentile("ttft", "p99")),
    Column("ITL p50", _percentile("itl", "p50"), is_wide=True),
    Column("ITL p99", _percentile("itl", "p99")),
)
WORKERS = (
    Column("", lambda row: _name(row["id"]), is_number=False),
    Column("state", lambda row: row["state"], is_number=False),
    Column("run", lambda row: str(row["num_running"])),
    Column("wait", lambda row: str(row["num_waiting"])),
    Column("tok/s", lambda row: _rate(row["tokens_per_s"])),
    Column("ITL p99", _percentile("itl", "p99"), is_wide=True),
    Column("weights", lambda row: size(row["memory"]["weights"]), is_wide=True),
    Column("KV", lambda row: size(row["memory"]["kv"])),
    Column("adapters", lambda row: size(row["memory"]["adapters"])),
    Column("free", lambda row: size(row["memory"]["free"])),
    Column("on device", lambda row: _held(row, "device"), is_wide=True),
    Column("on host", lambda row: _held(row, "host"), is_wide=True),
    Column("loading", lambda row: str(row["adapters"]["loading"]["number"]), is_wide=True),
)
TENANTS = (
    Column("", lambda row: _name(row["name"] or row["id"]), is_number=False),
    Column("req/s", lambda row: _rate(row["requests_per_s"])),
    Column("tok/s", lambda row: _rate(row["tokens_per_s"])),
    Column("KV", lambda row: size(row["kv_bytes"])),
    Column("adapters", lambda row: size(row["adapter_bytes"])),
    Column("id", lambda row: row["id"], is_wide=True, is_number=False),
)
