"""Sends completions of token ids in a closed loop, with the load generator of `loraplex bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loraplex.load.client import Call, Client, Outcome
from loraplex.load.figures import Figures, load_seconds, summarise
from loraplex.load.loops import closed_loop

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Job:
    """Request for `num_output` tokens after the token ids `prompt`. Sampling is greedy and ignores
    end tokens."""

    model: str
    prompt: list[int]
    num_output: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of the body, which not every server accepts."""

    def call(self, key: str) -> Call:
        body = {
            "model": self.model,
            "prompt": self.prompt,
            "max_tokens": self.num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            # With token ids, tokens without text are also counted.
            "return_token_ids": True,
            **self.extra,
        }
        return Call(self.model, key, "/completions", msgspec.json.encode(body))


async def run_load(url: str, key: str, jobs: Sequence[Job], concurrency: int) -> list[Outcome]:
    """Sends all jobs, at most `concurrency` at a time. Raises RuntimeError if one fails."""
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        if outcome.error:
            raise RuntimeError(f"{outcome.error}: {outcome.message}")
        outcomes.append(outcome)

    async with Client(url, timeout_s=TIMEOUT_S) as client:
        await closed_loop(client, (job.call(key) for job in jobs), concurrency, note)
    return outcomes


def figures_of(outcomes: Sequence[Outcome]) -> Figures:
    return summarise(outcomes, load_seconds(outcomes))
