"""Allowed and banned tokens and bounded thoughts, drawn by a random model among others."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from tokenizers import Tokenizer

from tests.workers.driver import Driver
from tests.workers.process.test_worker import Setup
from workers.wire import grammars
from workers.wire.protocol import (
    ErrorCode,
    FinishReason,
    Generate,
    SamplingParams,
    ThoughtBound,
    TokenRules,
)

BEGIN, END = 40, 41
"""Any tokens may be the markers."""
ALLOWED = (3, 64, 100, 255)
BANNED = tuple((first, second) for first in range(64) for second in range(128, 192))
BOUND = 7
SCHEMA = {"type": "array", "items": {"enum": ["a", "bb"]}, "minItems": 1, "maxItems": 3}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("tiny"), "llama", {"r4": {"rank": 4}})


def request_of(tiny: Setup, number: int, rules: TokenRules | None, grammar: str = "") -> Generate:
    rng = random.Random(number)
    params = SamplingParams(48, number, temperature=number % 2, ignore_eos=True, rules=rules)
    adapter = tiny.refs["r4"] if number % 3 else None
    prompt = [rng.randrange(256) for _ in range(12)]
    return Generate(
        number, str(number), tiny.digest, prompt, params, "t", adapter=adapter, grammar=grammar
    )


def answers_of(tiny: Setup, requests: list[Generate], **changes: Any) -> Driver:
    with Driver(tiny.config(**changes)) as driver:
        driver.run(*requests)
    return driver


def thinking(max_tokens: int, *, is_begun: bool) -> TokenRules:
    return TokenRules(thought=ThoughtBound(max_tokens, BEGIN, END, is_begun))


def after_thought(tiny: Setup) -> str:
    """A schema that holds for what follows the token `END`."""
    tokenizer = Tokenizer.from_file(str(tiny.model / "tokenizer.json"))
    schema = json.loads(grammars.of_json_schema(json.dumps(SCHEMA)))["grammars"][0]
    end = json.dumps(tokenizer.decode([END]))
    lark = f"start: thought @body\nTEXT: /(.|\\n)*/\nthought[lazy]: TEXT {end}"
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**schema, "name": "body"}]})


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "runs_ahead"), [("cpu", False), ("cpu", True), ("reference", False)]
)
def test_rules_hold_and_no_neighbour_changes(tiny: Setup, backend: str, runs_ahead: bool) -> None:
    """With so little memory that sequences are preempted, and resumed from anywhere."""
    rules = [
        TokenRules(allowed=ALLOWED),
        TokenRules(banned=((5,), *BANNED)),
        thinking(BOUND, is_begun=True),
        None,
    ]
    requests = [request_of(tiny, n, rules[n % 4]) for n in range(16)]
    settings = {"ops": backend, "runs_ahead": runs_ahead, "memory": 12 << 16}
    together = answers_of(tiny, requests, **settings)
    free = [request for request in requests if request.params.rules is None]
    alone = answers_of(tiny, free, **settings)
    resumed = [
        msgspec.structs.replace(
            request, tokens=request.tokens + together.answers[request.id][:10], num_resumed=10
        )
        for request in requests
    ]
    rest = answers_of(tiny, resumed, **settings)
    for number, answer in together.answers.items():
        assert together.ended[number] is FinishReason.LENGTH
        assert rest.answers[number] == answer[10:]
        match number % 4:
            case 0:
                assert set(answer) <= set(ALLOWED)
            case 1:
                assert 5 not in answer
                assert not set(BANNED) & set(pairwise(answer))
            case 2:
                assert END in answer[: BOUND + 1]
            case _:
                assert answer == alone.answers[number]
    free_pairs = [pair for a in alone.answers.values() for pair in pairwise(a)]
    assert set(BANNED) & set(free_pairs), "the model would not write what is banned"


@pytest.mark.parametrize("max_tokens", [0, BOUND])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_an_answer_keeps_to_its_schema_after_a_bounded_thought(
    tiny: Setup, max_tokens: int, logprobs: int | None
) -> None:
    tokenizer = Tokenizer.from_file(str(tiny.model / "tokenizer.json"))
    requests = [
        request_of(tiny, n, thinking(max_tokens, is_begun=True), after_thought(tiny))
        for n in range(6)
    ]
    requests = [
        msgspec.structs.replace(
            each, params=msgspec.structs.replace(each.params, max_tokens=200, logprobs=logprobs)
        )
        for each in requests
    ]
    driver = answers_of(tiny, requests)
    for number, answer in driver.answers.items():
        assert driver.ended[number] is FinishReason.STOP
        thought, rest = answer[: answer.index(END)], answer[answer.index(END) + 1 :]
        assert len(thought) <= max_tokens
        jsonschema_rs.validate(SCHEMA, json.loads(tokenizer.decode(rest)))
    longest = max(answer.index(END) for answer in driver.answers.values())
    assert longest == max_tokens


def test_rules_that_cannot_be_followed_are_refused(tiny: Setup) -> None:
    rules = [
        TokenRules(allowed=(1 << 20,)),
        TokenRules(banned=((1,), ())),
        TokenRules(thought=ThoughtBound(1, -1, END)),
        TokenRules(banned=((1, 1 << 20),)),
    ]
    requests = [request_of(tiny, number, each) for number, each in enumerate(rules)]
    requests.append(request_of(tiny, 9, TokenRules(allowed=(1,)), grammars.of_regex("a")))
    assert set(answers_of(tiny, requests).ended.values()) == {ErrorCode.INVALID}
