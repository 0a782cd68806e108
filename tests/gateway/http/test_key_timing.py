"""How long a refusal takes says nothing of what was wrong with the key."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import pytest

from gateway.catalog.catalog import INCORRECT, authenticate
from gateway.catalog.view import CatalogView
from store.records import BASE62, ApiKey, CatalogSnapshot, hash_key, new_key
from tests.gateway.pepper import PEPPER
from tests.scale import IS_FULL
from web.errors import Unauthenticated

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not IS_FULL, reason="measures times: make soak"),
]

NUM_SAMPLES = 200_000
"""Of both kinds together."""
WELCH_T = 4.5
KEPT = 0.9
"""The share of samples, of both kinds by one bound, that no other process fell into."""
SEED = 23
NOW = datetime.now(UTC)

Check = Callable[[str], object]


def sealed(key_id: str, secret: str) -> str:
    """A key of which the checksum is right."""
    body = f"lpx_{key_id}_{secret}"
    rest, digits = zlib.crc32(body.encode()), ""
    for _ in range(6):
        rest, digit = divmod(rest, 62)
        digits = BASE62[digit] + digits
    return body + digits


class Keys:
    """A thousand that exist, and guesses at them."""

    def __init__(self) -> None:
        self.chance = random.Random(SEED)
        self.real = [new_key() for _ in range(1000)]
        records = [
            ApiKey(key.id, "ten_acme", hash_key(key.text, PEPPER), frozenset()) for key in self.real
        ]
        self.view = CatalogView(CatalogSnapshot(1, (), tuple(records), (), (), ()))
        self.texts = {key.id: key.text for key in self.real}

    def with_unknown_ids(self) -> list[str]:
        return [sealed(new_key().id, self._secret()) for _ in self.real]

    def with_known_ids(self) -> list[str]:
        return [sealed(key.id, self._secret()) for key in self.real]

    def nearly_right(self) -> list[str]:
        """All but the last character of the secret."""
        return [sealed(key.id, key.text[17:59] + self._other(key.text[59])) for key in self.real]

    def all_wrong(self) -> list[str]:
        """The first character of the secret already."""
        return [sealed(key.id, self._other(key.text[17]) + self._secret()[1:]) for key in self.real]

    def _secret(self) -> str:
        return "".join(self.chance.choices(BASE62, k=43))

    def _other(self, character: str) -> str:
        return self.chance.choice(BASE62.replace(character, ""))

    def ours(self, text: str) -> None:
        authenticate(self.view, PEPPER, f"Bearer {text}", NOW)

    def leaky(self, text: str) -> None:
        """What the test must see: unknown ids are not hashed, and characters are compared until
        one differs."""
        right = self.texts.get(text[4:16])
        if right is not None:
            hash_key(text, PEPPER)
            if all(a == b for a, b in zip(text, right, strict=True)):
                return
        raise Unauthenticated(INCORRECT)


def welch_t(ones: Sequence[str], others: Sequence[str], check: Check) -> float:
    """Of the time it takes to refuse them, in an order drawn anew, without the slowest."""
    chance = random.Random(SEED)
    samples: tuple[list[int], list[int]] = ([], [])
    kinds = [0, 1] * (NUM_SAMPLES // 2)
    chance.shuffle(kinds)
    guesses = [(kind, chance.choice((ones, others)[kind])) for kind in kinds]
    clock = time.perf_counter_ns
    gc.collect()
    gc.disable()
    try:
        for kind, text in guesses:
            began = clock()
            try:
                check(text)
            except Unauthenticated:
                samples[kind].append(clock() - began)
    finally:
        gc.enable()
    assert len(samples[0]) + len(samples[1]) == len(kinds), "a guess was let in"
    bound = sorted(samples[0] + samples[1])[int(KEPT * len(kinds))]
    a, b = ([each for each in kind if each <= bound] for kind in samples)
    error = math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
    difference = statistics.fmean(a) - statistics.fmean(b)
    print(
        f"{len(a)} + {len(b)} refusals differ by {difference:.1f} ns: t = {difference / error:.2f}"
    )
    return abs(difference / error)


PAIRS = {
    "known or unknown id": (Keys.with_known_ids, Keys.with_unknown_ids),
    "right or wrong prefix": (Keys.nearly_right, Keys.all_wrong),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_refusal_takes_as_long_whatever_is_wrong(pair: str) -> None:
    keys = Keys()
    ones, others = (make(keys) for make in PAIRS[pair])
    assert welch_t(ones, others, keys.ours) < WELCH_T


@pytest.mark.parametrize("pair", PAIRS)
def test_a_leak_is_seen(pair: str) -> None:
    keys = Keys()
    ones, others = (make(keys) for make in PAIRS[pair])
    assert welch_t(ones, others, keys.leaky) > WELCH_T
