"""Makes the printed summary of a GPU report from the rows that its stages wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_LINES = 60
MAX_WIDTH = 200
MAX_FAILURES = 12

Row = dict[str, Any]

A_LINE_EACH = {
    "machine": ("device", "processors", "driver", "torch", "triton", "python"),
    "ceilings": ("copy_TB_s", "bf16_TFLOP_s", "launch_us"),
    "first launch": ("first_ms", "second_ms", "read", "compiled"),
    "attention blocks": ("rows", "context", "us"),
    "sampling": ("rows", "us"),
    "a long row": ("rows", "long", "all_short_us", "long_alone_us", "one_long_us"),
    "forms of LoRA": ("rows", "adapters", "by_row_us", "by_adapter_us"),
    "shrink beside the product": ("adapters", "rank", "of_behind"),
    "engine": (
        *("rows", "adapters", "ahead", "ms", "of_base", "of_bytes", "gap_us", "host_us"),
        "tokens_s",
    ),
    "mixed steps": ("rows", "adapters", "prompt_tokens", "decode_ms", "mixed_ms"),
    "warm-up": ("seconds", "graphs", "kernels", "graph_MB", "late_kernels"),
    "adapters": ("rank", "MB", "bytes_ms", "copied_ms"),
    "swap": ("swap_in_ms", "of_bytes", "swap_out_ms", "first_token_ms", "prompt_ms", "same"),
}
"""Columns of the parts for which each row is printed on its own line."""

ONE_LINE = {
    "transfers": ("what", "GB_s"),
    "products": ("rows", "share_of_copy"),
    "prefill": ("rows", "ms", "TFLOP_s"),
}
"""Columns of the parts whose rows are all printed on one line."""


def table(folder: Path) -> list[str]:
    """Returns at most 60 lines: failures, how each stage ended, and the essential figures."""
    ended = read_rows(folder / "report.jsonl")
    failures, figures = [], []
    for stage in ended:
        rows = read_rows(folder / f"{stage['stage']}.jsonl")
        failures += [f"FAILED {stage['stage']}: {text}" for text in _failures(stage, rows)]
        figures += [_status(stage, rows), *_figures(rows)]
    hidden = len(failures) - MAX_FAILURES
    if hidden > 0:
        failures[MAX_FAILURES:] = [f"... and {hidden} more failures"]
    lines = [*failures, *figures]
    if len(lines) > MAX_LINES:
        hidden = len(lines) - MAX_LINES + 1
        lines[MAX_LINES - 1 :] = [f"... and {hidden} more lines"]
    return [line if len(line) <= MAX_WIDTH else line[: MAX_WIDTH - 3] + "..." for line in lines]


def read_rows(path: Path) -> list[Row]:
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def _status(stage: Row, rows: list[Row]) -> str:
    if "skipped" in stage:
        return f"== {stage['stage']}: skipped, {stage['skipped']}"
    ends = [row for row in rows if "part_seconds" in row]
    kernels = ""
    if ends:
        read, compiled = ends[-1]["read_kernels"], ends[-1]["compiled_kernels"]
        kernels = f", {read} kernels from the cache, {compiled} compiled"
    code = stage.get("rc")
    result = "passed" if code == 0 else stage.get("error", f"exit code {code}")
    return f"== {stage['stage']}: {result}, {stage['seconds']} s{kernels}"


def _failures(stage: Row, rows: list[Row]) -> list[str]:
    texts: list[str] = []
    for row in rows:
        if "error" in row:
            texts.append(f"{row['part']}: {row['error']}")
        elif row.get("passed") is False:
            figures = {k: v for k, v in row.items() if k not in ("part", "passed", "tail")}
            tail = row.get("tail", [])[-1:]
            texts.append(" ".join([f"{row['part']}: {_joined(figures, tuple(figures))}", *tail]))
    # A stage that crashed before its first row has only a log.
    if not texts and stage.get("tail"):
        texts.append(stage["tail"][-1])
    return texts


def _figures(rows: list[Row]) -> list[str]:
    lines: list[str] = []
    for part in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in rows if row["part"] == part]
        if checks := [row for row in own if "passed" in row]:
            lines.append(f"{part}: {_checked(checks)}")
        name = part.partition(",")[0]
        if columns := A_LINE_EACH.get(name):
            figures = (_joined(row, columns) for row in own)
            lines += [f"{name}: {line}" for line in figures if line]
        if columns := ONE_LINE.get(name):
            each = ("/".join(_short(row[c]) for c in columns if c in row) for row in own)
            lines.append(
                f"{name} ({'/'.join(columns)}): {', '.join(line for line in each if line)}"
            )
    return lines


def _checked(rows: list[Row]) -> str:
    text = f"{sum(row['passed'] for row in rows)} of {len(rows)} passed"
    errors = [(max(row["errors"]), row["case"]) for row in rows if row.get("errors")]
    return f"{text}, worst error {max(errors)[0]:.2g} ({max(errors)[1]})" if errors else text


def _joined(row: Row, columns: tuple[str, ...]) -> str:
    return "  ".join(f"{name} {_short(row[name])}" for name in columns if name in row)


def _short(value: Any) -> str:
    match value:
        case float():
            return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
        case list():
            return "/".join(map(_short, value))
        case dict():
            return " ".join(f"{name}={_short(each)}" for name, each in value.items())
        case _:
            return str(value)
