"""Waiting sequences count with the tokens that will be computed for them, not with those that are
cached or that another one computes first."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

import msgspec
import pytest

from memory.page_key import PAGE_TOKENS, PageHasher
from memory.pages import PagePool
from memory.prefix_cache import PrefixCache
from tests.workers.counting import Market
from tests.workers.scheduling.test_fairness import ask
from workers.execution.speed import measure_speed
from workers.policies.queue_limits import QueueBounds
from workers.process.warm_up import warm_up
from workers.wire.protocol import Generate, ServiceClass

NUM_TOKENS = 4000
"""Of a prompt, which takes four seconds; the longest wait is 15."""


def fresh_market() -> Market:
    market = Market(num_pages=12_000, max_num_seqs=64, max_batched_tokens=512)
    warm_up(market.engine)
    measure_speed(market.engine, market.clock)
    return market


def prompt(rng: random.Random, num_tokens: int = NUM_TOKENS) -> Generate:
    return ask(rng, "t", num_tokens, 8, service_class=ServiceClass.INTERACTIVE)


def choices(rng: random.Random, first: Generate, count: int, *, ending: int = 0) -> list[Generate]:
    """Requests with the prompt of `first`, or with all but its last tokens."""
    made: list[Generate] = []
    for _ in range(count):
        other = ask(rng, "t", max(ending, 1), 8, service_class=first.service_class)
        tokens = first.tokens[: len(first.tokens) - ending] + other.tokens[:ending]
        made.append(msgspec.structs.replace(other, tokens=tokens))
    return made


def finish(market: Market) -> None:
    market.run()


@pytest.mark.parametrize(("count", "ending"), [(16, 0), (64, 0), (16, 5), (16, 100)])
def test_cached_prompts_are_accepted(count: int, ending: int) -> None:
    rng = random.Random(1)
    market, first = fresh_market(), prompt(rng)
    market.offer(first)
    finish(market)
    market.offer(*choices(rng, first, count, ending=ending))
    assert not market.failed
    assert market.scheduler.num_waiting_tokens <= count * (ending + 2 * PAGE_TOKENS)
    finish(market)
    assert len(market.ended) == count + 1
    assert market.scheduler.num_waiting_tokens == 0


@pytest.mark.parametrize("num_prompts", [1, 2])
@pytest.mark.parametrize("count", [4, 16])
def test_choices_of_a_prompt_count_once(num_prompts: int, count: int) -> None:
    rng = random.Random(2)
    market = fresh_market()
    for _ in range(num_prompts):
        market.offer(*choices(rng, prompt(rng), count))
    assert not market.failed
    num_left = num_prompts * count * 2 * PAGE_TOKENS
    assert market.scheduler.num_waiting_tokens <= num_prompts * NUM_TOKENS + num_left
    finish(market)
    assert len(market.ended) == num_prompts * count
    assert market.scheduler.num_waiting_tokens == 0


def test_prompts_that_are_computed_are_refused_after_many_that_were_cached() -> None:
    """What is found of some prompts says nothing of others that are known not to be cached."""
    rng = random.Random(3)
    market, first = fresh_market(), prompt(rng)
    market.offer(first)
    finish(market)
    market.offer(*choices(rng, first, 64))
    finish(market)
    requests = [prompt(rng, 600) for _ in range(100)]
    market.offer(*requests)
    refused = market.failed.keys()
    assert refused, "100 prompts take a minute"
    finish(market)
    waits = [
        market.first_s[each.id] - market.arrived_s[each.id]
        for each in requests
        if each.id not in refused
    ]
    assert 10.0 <= max(waits) <= 15.0


def test_a_choice_counts_whole_once_the_one_that_it_waited_for_has_gone() -> None:
    rng = random.Random(4)
    market = fresh_market()
    requests = choices(rng, prompt(rng), 3)
    market.offer(*requests)
    for number, request in enumerate(requests):
        num_left = len(requests) - number
        tokens = market.scheduler.num_waiting_tokens
        assert NUM_TOKENS <= tokens <= NUM_TOKENS + num_left * 2 * PAGE_TOKENS
        market.engine.abort(0, request.id)
    assert market.scheduler.num_waiting_tokens == 0


def test_scores_and_other_tenants_share_nothing() -> None:
    rng = random.Random(5)
    market, first = fresh_market(), prompt(rng, 600)
    market.offer(first)
    finish(market)
    scored, other = choices(rng, first, 2)
    params = msgspec.structs.replace(scored.params, prompt_logprobs=0)
    market.offer(msgspec.structs.replace(scored, params=params))
    market.offer(msgspec.structs.replace(other, tenant="u", cache_domain="u"))
    assert market.scheduler.num_waiting_tokens == 1200


def test_a_refused_prompt_that_is_not_cached_costs_one_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flood of refusals leaves the engine its time."""
    rng = random.Random(6)
    market = fresh_market()
    while not market.failed:
        market.offer(prompt(rng))
    refused = prompt(rng)
    num_keys = 0
    key = PageHasher.key

    def counted(*arguments: Any) -> bytes:
        nonlocal num_keys
        num_keys += 1
        return key(*arguments)

    monkeypatch.setattr(PageHasher, "key", counted)
    market.offer(refused)
    assert refused.id in market.failed
    assert num_keys == 1


class Beside(NamedTuple):
    """A prompt that is being computed while a request with the same prompt comes."""

    service_class: ServiceClass
    tenant: str = "t"
    priority: int = 0


@pytest.mark.parametrize(
    "begun",
    [
        Beside(ServiceClass.BATCH),
        Beside(ServiceClass.STANDARD),
        Beside(ServiceClass.INTERACTIVE),
        Beside(ServiceClass.BATCH, "heavy"),
    ],
)
@pytest.mark.parametrize("num_begun", [0, 1000])
def test_a_shared_prompt_is_computed_no_later_than_an_own_one(
    begun: Beside, num_begun: int
) -> None:
    """Tenants that all have the prompt in their cache domain, beside a backlog of others. With the
    class of the begun prompt, the request would wait for that class's small share."""

    def wait_s(*, is_shared: bool) -> float:
        rng = random.Random(7)
        market = Market(
            num_pages=12_000,
            max_num_seqs=64,
            max_batched_tokens=256,
            bounds=QueueBounds(max_wait_s=1e9),
        )
        first = msgspec.structs.replace(prompt(rng), cache_domain="shared")
        fields = dict(begun._asdict())
        market.offer(msgspec.structs.replace(prompt(rng) if not is_shared else first, **fields))
        while market.engine.scheduler.running[:1] == [] or (
            market.engine.scheduler.running[0].num_computed < num_begun
        ):
            market.step()
        for _ in range(30):
            market.offer(ask(rng, "u", 2000, 4, service_class=ServiceClass.INTERACTIVE))
            market.offer(ask(rng, "heavy", 2000, 4, service_class=ServiceClass.INTERACTIVE))
        (late,) = choices(rng, first, 1, ending=20)
        late = msgspec.structs.replace(late, cache_domain="shared")
        market.offer(late)
        while late.id not in market.first_s:
            market.step()
        assert not market.failed
        return market.first_s[late.id] - market.arrived_s[late.id]

    assert wait_s(is_shared=True) <= 1.1 * wait_s(is_shared=False) + 0.5


def test_waiting_for_a_shared_prompt_touches_few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 choices wait for a prompt of 250 pages, of which more and more are cached."""
    rng = random.Random(8)
    market, first = fresh_market(), prompt(rng)
    market.offer(first)
    market.step()
    market.offer(*choices(rng, first, 63, ending=1))
    counts: Counter[str] = Counter()
    for owner, name in ((PagePool, "retain"), (PrefixCache, "__contains__"), (PageHasher, "key")):
        call = getattr(owner, name)

        def counted(*arguments: Any, call: Any = call, name: str = name) -> Any:
            counts[name] += 1
            return call(*arguments)

        monkeypatch.setattr(owner, name, counted)
    num_steps = 0
    while len(market.engine.scheduler.running) == 1:
        market.step()
        num_steps += 1
    assert num_steps >= 7
    num_started = len(market.engine.scheduler.running) - 1
    num_pages = NUM_TOKENS // PAGE_TOKENS
    assert counts["retain"] <= num_pages * (num_started + 1)
    assert counts["__contains__"] <= num_steps * 63 * 2 * num_pages.bit_length()
    assert counts["key"] <= 2 * num_pages * 64
    finish(market)
    assert not market.failed


@pytest.mark.parametrize("num_tokens", [600, NUM_TOKENS])
def test_a_queued_prompt_costs_few_keys(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    """Whatever its length: one of the whole prompt, one of its first page."""
    market, request = fresh_market(), prompt(random.Random(9), num_tokens)
    num_keys = 0
    key = PageHasher.key

    def counted(*arguments: Any) -> bytes:
        nonlocal num_keys
        num_keys += 1
        return key(*arguments)

    monkeypatch.setattr(PageHasher, "key", counted)
    market.offer(request)
    assert num_keys == 2
