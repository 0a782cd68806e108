"""The prefix cache as a side channel: a tenant gets nothing from the cache of what others have
asked. In the full form the times of answers say nothing of it either."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.tiny import NAME, Tiny
from tests.scale import IS_FULL, scaled
from tests.stack import Stack, running
from tests.waiting import until

pytestmark = pytest.mark.full

NUM_TRIALS = scaled(10, 500)
PREFIX_TOKENS = 1200
TOLERANCE = 0.05
"""Of the area under the curve from 0.5: about three standard deviations of that many trials."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    tiny = Tiny(tmp_path_factory.mktemp("timing"), max_position_embeddings=2048)
    with running(tiny.stack()) as stack:
        yield stack


class Caller:
    def __init__(self, stack: Stack, tenant: str) -> None:
        headers = {"authorization": f"Bearer {stack.create_tenant(tenant)}"}
        self.http = httpx.Client(base_url=stack.url, headers=headers, timeout=60)
        until(lambda: self.http.get("/v1/models").status_code == 200)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def ask(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds until the one token is there, and prompt tokens that came from the cache."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": 1}
        begun = time.perf_counter()
        answer = self.http.post("/v1/completions", json=body)
        took = time.perf_counter() - begun
        assert answer.status_code == 200, answer.text
        return took, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def area_under_curve(quick: list[float], slow: list[float]) -> float:
    """The chance that one of `quick` is less than one of `slow`; 0.5: they tell nothing."""
    wins = sum((q < s) + 0.5 * (q == s) for q in quick for s in slow)
    return wins / (len(quick) * len(slow))


@pytest.mark.soak
@pytest.mark.parametrize("whose", ["another tenant's", "one's own"])
def test_time_tells_only_of_ones_own_prefixes(stack: Stack, whose: str) -> None:
    """Guesses that are right beside guesses that are wrong. One's own are told apart, which shows
    that this looks where there is something to see."""
    draw = random.Random(25)
    right: list[float] = []
    wrong: list[float] = []
    cached = 0
    with Caller(stack, f"victim-{len(whose)}") as victim, Caller(stack, whose[:3]) as other:
        attacker = victim if whose == "one's own" else other
        for _ in range(NUM_TRIALS):
            secret, guess = ([draw.randrange(3, 90) for _ in range(PREFIX_TOKENS)] for _ in "sg")
            victim.ask(secret)
            for prompt, found in draw.sample([(secret, right), (guess, wrong)], 2):
                took, from_cache = attacker.ask(prompt)
                found.append(took)
                cached += from_cache
    area = area_under_curve(right, wrong)
    print(f"{whose} prefixes: area under the curve {area:.3f}, {NUM_TRIALS} trials")
    is_own = whose == "one's own"
    assert (cached > 0) is is_own
    if IS_FULL:
        assert area > 0.5 + TOLERANCE if is_own else abs(area - 0.5) < TOLERANCE
