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

from loraplex.commands.command import Command
from loraplex.errors import ApiFailure, BadSettings
from loraplex.output import ProgressCallback, is_json, progress, show_list
from loraplex.settings import load_settings
from loraplex.tables import Column, Kind, Row, exact

if TYPE_CHECKING:
    from loraplex.load.client import Outcome
    from loraplex.load.figures import Figures, Percentiles, Targets
    from loraplex.load.loops import OnEnd
    from loraplex.load.plan import Plan

MAX_REQUESTS = 100_000
MAX_CONCURRENCY = 1024
MAX_RATE = 10_000
MAX_DURATION_S = 86_400
MAX_TOKENS = 1 << 17
MAX_MODELS = 10_000
DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 8
ALL = "all"
"""Name of the class if there is only one, or of the row that sums up all classes."""
TIMES = ("TTFT", "ITL", "e2e")
BAR_WIDTH = 40
MAX_BARS = 12
_CLASS = re.compile(r"([\w.-]{1,64})=([A-Za-z_]\w*)")


class Number(click.FloatRange):
    """Range of numbers that excludes `nan`, which click accepts in every range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail("this is not a number", param, ctx)
        return found


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
    "--zipf",
    type=Number(0, 10),
    default=0.0,
    show_default=True,
    help="The k-th model gets 1/k^ZIPF of the first model's requests.",
)
@click.option(
    "--class",
    "classes",
    multiple=True,
    metavar="NAME=VARIABLE",
    help="Class of requests that use the API key in this environment variable; may be repeated,"
    " classes then alternate.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, MAX_CONCURRENCY),
    help="Number of concurrent clients (default: 8).",
)
@click.option(
    "--rate",
    type=Number(0, MAX_RATE, min_open=True),
    help="Requests per second at random times, instead of --concurrency.",
)
@click.option(
    "--requests", type=click.IntRange(1, MAX_REQUESTS), help="Number of requests (default: 100)."
)
@click.option(
    "--duration",
    type=Number(0, MAX_DURATION_S, min_open=True),
    help="Seconds during which requests are sent, instead of --requests.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1, MAX_TOKENS),
    default=64,
    show_default=True,
    help="Approximate length of each prompt in tokens.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(1, MAX_TOKENS),
    default=64,
    show_default=True,
    help="Maximum tokens of each answer.",
)
@click.option(
    "--ignore-eos",
    "ignores_eos",
    is_flag=True,
    help="Always generate --output-tokens tokens (vLLM and loraplex only).",
)
@click.option(
    "--endpoint",
    type=click.Choice(["chat", "completions"]),
    default="chat",
    show_default=True,
    help="Route below /v1: chat/completions or completions.",
)
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
@click.option(
    "--timeout",
    "timeout_s",
    type=Number(0, 3600, min_open=True),
    default=300.0,
    show_default=True,
    help="Maximum seconds for one answer.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of prompts, models and times."
)
@click.option("--plot", is_flag=True, help="Show the latencies as bars.")
def bench_command(
    url: str | None,
    models: tuple[str, ...],
    classes: tuple[str, ...],
    concurrency: int | None,
    requests: int | None,
    ttft_target: float | None,
    itl_target: float | None,
    plot: bool,
    **given: Any,
) -> None:
    """Send streamed requests and show times, rates and goodput.

    Without --rate, a fixed number of clients wait for each answer (closed loop). With it, requests
    are sent independently of earlier ones (open loop). One request of each class is sent first and
    not counted. If it fails, the command fails.
    """
    # Imported here, because this import is slow.
    from loraplex.load.figures import Targets
    from loraplex.load.plan import Plan, run_plan

    rate, duration = given["rate"], given["duration"]
    if concurrency is not None and rate is not None:
        raise click.UsageError("give --concurrency or --rate, not both")
    if plot and is_json():
        raise click.UsageError("give --plot or --json, not both")
    if len(models) > MAX_MODELS:
        raise click.UsageError(f"--model: {len(models)} models, at most {MAX_MODELS}")
    place, keys = _place(url, classes)
    plan = Plan(
        models=models,
        keys=keys,
        concurrency=concurrency or DEFAULT_CONCURRENCY,
        requests=requests or (MAX_REQUESTS if duration else DEFAULT_REQUESTS),
        is_counted=requests is not None or duration is None,
        **given,
    )
    outcomes: list[Outcome] = []
    with progress("requests" if plan.is_counted else "seconds", of_bytes=False) as report:
        asyncio.run(run_plan(place, plan, _noting(outcomes, plan, report)))
    _tell(place, plan, outcomes, Targets(ttft_target, itl_target), plot=plot)
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


def _tell(url: str, plan: Plan, outcomes: list[Outcome], targets: Targets, *, plot: bool) -> None:
    from loraplex.load.figures import failures, load_seconds, summarise

    seconds = load_seconds(outcomes)
    groups = {name: [o for o in outcomes if o.group == name] for name in plan.keys}
    found = {name: summarise(group, seconds, targets) for name, group in groups.items()}
    total = summarise(outcomes, seconds, targets)
    failed = failures(outcomes)
    if is_json():
        load = {name: value for name, value in plan._asdict().items() if name != "keys"}
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
