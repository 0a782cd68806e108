"""`loraplex bench`: measures a server under load."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
import msgspec

from loraplex.commands.command import Command
from loraplex.commands.options import Number, struct_options
from loraplex.errors import ApiFailure, BadSettings
from loraplex.load.plan import MAX_REQUESTS, Plan, run_plan
from loraplex.output import ProgressCallback, is_json, progress, show_list
from loraplex.settings import load_settings
from loraplex.tables import Column, Kind, Row, exact

if TYPE_CHECKING:
    from loraplex.load.client import Outcome
    from loraplex.load.figures import Figures, Percentiles, Targets
    from loraplex.load.loops import OnEnd

MAX_MODELS = 10_000
ALL = "all"
"""Name of the only class if --class is not given, and of the row that sums up all classes."""
TIMES = ("TTFT", "ITL", "e2e")
BAR_WIDTH = 40
MAX_BARS = 12
_CLASS = re.compile(r"([\w.-]{1,64})=([A-Za-z_]\w*)")


OPTIONS = (
    *("zipf", "concurrency", "rate", "requests", "duration", "prompt_tokens", "output_tokens"),
    *("ignores_eos", "endpoint", "timeout_s", "seed"),
)
"""Fields of the plan that are options of the command."""


@click.command("bench", cls=Command, example="--model support-bot --rate 5 --duration 60 --plot")
@click.option(
    "--url", help="URL of an OpenAI-compatible server (default: LORAPLEX_URL, or this machine)."
)
@click.option(
    "--model",
    "models",
    multiple=True,
    required=True,
    help="Model to call; may be repeated, most popular first.",
)
@click.option(
    "--class",
    "classes",
    multiple=True,
    metavar="NAME=VARIABLE",
    help="Class of requests that use the API key in this environment variable; may be repeated,"
    " classes then alternate.",
)
@struct_options(Plan, *OPTIONS, flags={"ignores_eos": "--ignore-eos", "timeout_s": "--timeout"})
@click.option(
    "--ttft-target",
    type=Number(0, min_open=True),
    metavar="MS",
    help="Count as goodput only requests whose first token arrived within these milliseconds.",
)
@click.option(
    "--itl-target",
    type=Number(0, min_open=True),
    metavar="MS",
    help="Count as goodput only requests with at most this mean time between tokens, in"
    " milliseconds.",
)
@click.option("--plot", is_flag=True, help="Show the latencies as bars.")
def bench_command(
    url: str | None,
    models: tuple[str, ...],
    classes: tuple[str, ...],
    ttft_target: float | None,
    itl_target: float | None,
    plot: bool,
    **flags: Any,
) -> None:
    """Send streamed requests and show times, rates and goodput.

    Without --rate, a fixed number of clients wait for each answer (closed loop). With it, requests
    are sent independently of earlier ones (open loop). One request of each class is sent first and
    not counted. If it fails, the command fails.
    """
    # Imported here, because this import is slow.
    from loraplex.load.figures import Targets

    given = {name: value for name, value in flags.items() if value is not None}
    if "concurrency" in given and "rate" in given:
        raise click.UsageError("give --concurrency or --rate, not both")
    if plot and is_json():
        raise click.UsageError("give --plot or --json, not both")
    if len(models) > MAX_MODELS:
        raise click.UsageError(f"--model: {len(models)} models, at most {MAX_MODELS}")
    place, keys = _place(url, classes)
    is_counted = "requests" in given or "duration" not in given
    if not is_counted:
        given["requests"] = MAX_REQUESTS
    plan = Plan(models=models, keys=keys, is_counted=is_counted, **given)
    outcomes: list[Outcome] = []
    with progress("requests" if plan.is_counted else "seconds", of_bytes=False) as report:
        asyncio.run(run_plan(place, plan, _noting(outcomes, plan, report)))
    _print_report(place, plan, outcomes, Targets(ttft_target, itl_target), plot=plot)
    if all(outcome.error for outcome in outcomes):
        raise ApiFailure("no request was answered")


def _place(url: str | None, classes: tuple[str, ...]) -> tuple[str, dict[str, str | None]]:
    """Returns the server's URL and each class's key. Raises UsageError, BadSettings, ApiFailure."""
    from loraplex.api import endpoint

    place, key = endpoint(load_settings({}), url)
    keys: dict[str, str | None] = {}
    for text in classes:
        if (found := _CLASS.fullmatch(text)) is None or found[1] == ALL or found[1] in keys:
            raise click.UsageError(f"--class: {text!r} is not NAME=VARIABLE with a new name")
        if not (given := os.environ.get(found[2])):
            raise BadSettings(f"--class: the environment variable {found[2]} is not set")
        keys[found[1]] = given
    keys = keys or {ALL: key}
    for name, each in keys.items():
        if each is not None and not (each.isascii() and each.isprintable()):
            raise BadSettings(f"the key of {name}: an API key has only printable ASCII characters")
    return place, keys


def _noting(outcomes: list[Outcome], plan: Plan, report: ProgressCallback) -> OnEnd:
    """Returns a callback that records outcomes and reports progress: in requests, or in seconds if
    a duration limits the load."""
    begun_s = time.perf_counter()
    seconds = None if plan.is_counted or plan.duration is None else max(1, round(plan.duration))

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if seconds is None:
            report(len(outcomes), plan.requests)
        else:
            report(min(int(time.perf_counter() - begun_s), seconds), seconds)

    return note


def _print_report(
    url: str, plan: Plan, outcomes: list[Outcome], targets: Targets, *, plot: bool
) -> None:
    from loraplex.load.figures import failures, load_seconds, summarise

    seconds = load_seconds(outcomes)
    groups = {name: [o for o in outcomes if o.group == name] for name in plan.keys}
    found = {name: summarise(group, seconds, targets) for name, group in groups.items()}
    total = summarise(outcomes, seconds, targets)
    failed = failures(outcomes)
    if is_json():
        load = {
            name: value for name, value in msgspec.structs.asdict(plan).items() if name != "keys"
        }
        document = {
            "url": url,
            "load": load,
            "targets": targets._asdict(),
            "seconds": seconds,
            "classes": {name: asdict(figures) for name, figures in found.items()},
            "all": asdict(total),
            "failures": [{"requests": n, "code": code, "message": m} for n, code, m in failed],
        }
        print(json.dumps(document, indent=2))
        return
    if ALL not in found:
        found[ALL] = total
    rows = [_row(name, figures) for name, figures in found.items()]
    title = f"{seconds:.1f} s; times in ms: p50 / p90 / p99"
    columns = [Column(name, name, Kind.WORD) for name in rows[0] if rows[0][name] is not None]
    print(title)
    show_list(rows, columns)
    if failed:
        names = ("failed", "code", "message")
        kinds = (Kind.NUMBER, Kind.WORD, Kind.PROSE)
        shown: list[Row] = [dict(zip(names, each, strict=True)) for each in failed]
        show_list(shown, [Column(*each) for each in zip(names, names, kinds, strict=True)])
    if plot:
        _plot(outcomes)


def _row(name: str, figures: Figures) -> dict[str, Any]:
    times = (figures.ttft_ms, figures.itl_ms, figures.e2e_ms)
    row: dict[str, Any] = {
        "class": name,
        "requests": figures.requests,
        "failed": figures.requests - figures.completed,
        "requests/s": figures.requests_per_s,
        "output/s": figures.output_per_s,
        "tokens/s": figures.total_per_s,
        "cached": f"{figures.cached_tokens / max(figures.prompt_tokens, 1):.0%}",
    }
    row |= {name: _milliseconds(each) for name, each in zip(TIMES, times, strict=True)}
    good = figures.goodput_per_s
    row["goodput/s"] = None if good is None else f"{exact(good)} ({figures.good_share:.0%})"
    return row


def _milliseconds(times: Percentiles | None) -> str:
    return "" if times is None else " / ".join(map(exact, (times.p50, times.p90, times.p99)))


def _plot(outcomes: list[Outcome]) -> None:
    """Prints two bar charts: of the times to the first token, and of the times of whole answers."""
    from loraplex.load.figures import ttft_ms

    whole = [outcome for outcome in outcomes if not outcome.error]
    e2e = [(outcome.ended_s - outcome.begun_s) * 1e3 for outcome in whole]
    for name, values in (("TTFT", ttft_ms(whole)), ("e2e", e2e)):
        if values:
            print(f"\n{name}, ms: requests")
            print("\n".join(_bars(values, "█" if _can_print("█") else "#")))


def _bars(values: list[float], block: str) -> Iterator[str]:
    """Yields a line with a bar for each range of the positive values. Each range is wider than the
    previous one by a constant factor."""
    import numpy as np

    low, high = min(values), max(values)
    edges = np.geomspace(low, high, MAX_BARS + 1 if high > low else 2)
    numbers = np.histogram(values, edges)[0]
    for number, low, high in zip(numbers, edges, edges[1:], strict=False):
        bar = block * math.ceil(BAR_WIDTH * number / numbers.max())
        yield f"{exact(float(low)):>9} - {exact(float(high)):<9} {number:>6} {bar}"


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return False
    return True
