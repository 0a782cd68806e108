"""Waiting sequences count with the tokens that will be computed for them, not with those that are
cached or that another one computes first."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from memory.page_key import PAGE_TOKENS, PageHasher
from tests.workers.counting import Market
from tests.workers.scheduling.test_fairness import ask
from workers.execution.speed import measure_speed
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
    while market.engine.has_work:
        market.step()


@pytest.mark.parametrize(("count", "ending"), [(16, 0), (64, 0), (16, 5), (16, 100)])
def test_cached_prompts_are_accepted(count: int, ending: int) -> None:
    rng = random.Random(1)
    market, first = fresh_market(), prompt(rng)
    market.offer(first)
    finish(market)
    for request in choices(rng, first, count, ending=ending):
        market.offer(request)
    assert not market.failed
    assert market.report.num_waiting_tokens <= count * (ending + 2 * PAGE_TOKENS)
    finish(market)
    assert len(market.ended) == count + 1
    assert market.report.num_waiting_tokens == 0


@pytest.mark.parametrize("num_prompts", [1, 2])
@pytest.mark.parametrize("count", [4, 16])
def test_choices_of_a_prompt_count_once(num_prompts: int, count: int) -> None:
    rng = random.Random(2)
    market = fresh_market()
    for _ in range(num_prompts):
        for request in choices(rng, prompt(rng), count):
            market.offer(request)
    assert not market.failed
    num_left = num_prompts * count * 2 * PAGE_TOKENS
    assert market.report.num_waiting_tokens <= num_prompts * NUM_TOKENS + num_left
    finish(market)
    assert len(market.ended) == num_prompts * count
    assert market.report.num_waiting_tokens == 0


def test_prompts_that_are_computed_are_refused_after_many_that_were_cached() -> None:
    """What is found of some prompts says nothing of others that are known not to be cached."""
    rng = random.Random(3)
    market, first = fresh_market(), prompt(rng)
    market.offer(first)
    finish(market)
    for request in choices(rng, first, 64):
        market.offer(request)
    finish(market)
    requests = [prompt(rng, 600) for _ in range(100)]
    for request in requests:
        market.offer(request)
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
    for request in requests:
        market.offer(request)
    for number, request in enumerate(requests):
        num_left = len(requests) - number
        tokens = market.report.num_waiting_tokens
        assert NUM_TOKENS <= tokens <= NUM_TOKENS + num_left * 2 * PAGE_TOKENS
        market.engine.abort(0, request.id)
    assert market.report.num_waiting_tokens == 0


def test_scores_and_other_tenants_share_nothing() -> None:
    rng = random.Random(5)
    market, first = fresh_market(), prompt(rng, 600)
    market.offer(first)
    finish(market)
    scored, other = choices(rng, first, 2)
    params = msgspec.structs.replace(scored.params, prompt_logprobs=0)
    market.offer(msgspec.structs.replace(scored, params=params))
    market.offer(msgspec.structs.replace(other, tenant="u", cache_domain="u"))
    assert market.report.num_waiting_tokens == 1200


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
