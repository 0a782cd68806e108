"""Load that `loraplex bench` sends: generated prompts, models by popularity, classes in turn."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loraplex.errors import ApiFailure
from loraplex.load.client import Call, Client
from loraplex.load.loops import OnEnd, closed_loop, open_loop

ENDPOINTS = {"chat": "/chat/completions", "completions": "/completions"}
MAX_REQUESTS = 100_000
TEXT = (
    "time year people way day man thing woman life child world school state family student group"
    " country problem hand part place case week company system program question work number night"
    " point home water room mother area money story fact month lot right study book eye job word"
)
"""Words that most tokenizers encode as one token each."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Requests to send, and their rate. The docstrings of optional fields are the help of
    `loraplex bench`."""

    models: tuple[str, ...]
    """Names of the models, the most popular one first."""
    keys: dict[str, str | None]
    """API key of each class. None sends no key."""
    is_counted: bool = True
    """Whether a number of requests limits the load. Otherwise only a duration limits it."""
    zipf: Annotated[float, Meta(ge=0, le=10)] = 0.0
    """The k-th model gets 1/k^ZIPF of the first model's requests."""
    concurrency: Annotated[int, Meta(ge=1, le=1024)] = 8
    """Number of concurrent clients."""
    rate: Annotated[float, Meta(gt=0, le=10_000)] | None = None
    """Requests per second at random times, instead of --concurrency."""
    requests: Annotated[int, Meta(ge=1, le=MAX_REQUESTS)] = 100
    """Number of requests."""
    duration: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    """Seconds during which requests are sent, instead of --requests."""
    prompt_tokens: Annotated[int, Meta(ge=1, le=1 << 17)] = 64
    """Approximate number of tokens of each prompt."""
    output_tokens: Annotated[int, Meta(ge=1, le=1 << 17)] = 64
    """Maximum number of tokens of each answer."""
    ignores_eos: bool = False
    """Always generate --output-tokens tokens (vLLM and loraplex only)."""
    endpoint: Literal["chat", "completions"] = "chat"
    """Route below /v1: chat/completions or completions."""
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 300.0
    """Maximum seconds for one answer."""
    seed: int = 0
    """Seed of prompts, models and times."""


async def run_plan(url: str, plan: Plan, on_end: OnEnd) -> None:
    """Sends one request of each class to the first model, then the load. Raises ApiFailure if one
    of the first requests fails, and BadSettings if the URL is invalid."""
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
    """Yields calls without end."""
    places = range(1, len(plan.models) + 1)
    weights = list(itertools.accumulate(place**-plan.zipf for place in places))
    for group in itertools.cycle(plan.keys):
        (model,) = rng.choices(plan.models, cum_weights=weights)
        yield _call(plan, group, model, rng)


def _call(plan: Plan, group: str, model: str, rng: random.Random) -> Call:
    """Returns a call with a random prompt, so that calls do not share prefixes."""
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
