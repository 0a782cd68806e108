"""A load as `loraplex bench` sends it: made-up prompts, models by popularity, classes in turn."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from loraplex.errors import ApiFailure
from loraplex.load.client import Call, Client
from loraplex.load.loops import OnEnd, closed_loop, open_loop

ENDPOINTS = {"chat": "/chat/completions", "completions": "/completions"}
TEXT = (
    "time year people way day man thing woman life child world school state family student group"
    " country problem hand part place case week company system program question work number night"
    " point home water room mother area money story fact month lot right study book eye job word"
)
"""Its words are one token each for most tokenizers."""


class Plan(NamedTuple):
    """What to send, and how fast."""

    models: tuple[str, ...]
    """The most popular first."""
    zipf: float
    keys: dict[str, str | None]
    """By class."""
    endpoint: str
    prompt_tokens: int
    output_tokens: int
    ignores_eos: bool
    concurrency: int
    """Requests at a time of a closed loop, which a plan is without a rate."""
    rate: float | None
    requests: int
    is_counted: bool
    """The number of requests was asked for, not a duration alone."""
    duration: float | None
    seed: int
    timeout_s: float


async def run_plan(url: str, plan: Plan, on_end: OnEnd) -> None:
    """One request of each class goes ahead, for the first model: raises ApiFailure if it fails.
    Raises BadSettings for a URL that is none."""
    rng = random.Random(plan.seed)
    async with Client(url, timeout_s=plan.timeout_s) as client:
        for group in plan.keys:
            first = await client.send(_call(plan, group, plan.models[0], rng))
            if first.error:
                raise ApiFailure(f"{url}: {first.error}: {first.message}")
        calls = itertools.islice(_calls(plan, rng), plan.requests)
        if plan.rate is None:
            await closed_loop(client, calls, plan.concurrency, on_end, seconds=plan.duration)
        else:
            arrivals = random.Random(f"{plan.seed} arrivals")
            await open_loop(client, calls, plan.rate, on_end, rng=arrivals, seconds=plan.duration)


def _calls(plan: Plan, rng: random.Random) -> Iterator[Call]:
    """Without end."""
    places = range(1, len(plan.models) + 1)
    weights = list(itertools.accumulate(place**-plan.zipf for place in places))
    for group in itertools.cycle(plan.keys):
        (model,) = rng.choices(plan.models, cum_weights=weights)
        yield _call(plan, group, model, rng)


def _call(plan: Plan, group: str, model: str, rng: random.Random) -> Call:
    """With a prompt that no other call has."""
    text = " ".join(rng.choices(TEXT.split(), k=plan.prompt_tokens))
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": plan.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if plan.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    if plan.ignores_eos:
        body["ignore_eos"] = True
    return Call(group, plan.keys[group], ENDPOINTS[plan.endpoint], json.dumps(body).encode())
