"""Constrained sequences among others: always valid, and at no cost to their neighbours' tokens."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from tokenizers import Tokenizer

from tests.workers.driver import Driver
from tests.workers.process.test_worker import Setup
from workers.constraints import sequence_grammar
from workers.wire import grammars
from workers.wire.protocol import ErrorCode, FinishReason, Generate, SamplingParams

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"enum": ["yes", "no", 3, None]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}, {"type": "null"}]},
    {"type": "string", "format": "date"},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"enum": [1, 2]}}},
]
REGEX = "(ab|[0-9]{2}){1,4}-[x-z]{3}"


def is_of_schema(schema: dict[str, Any], text: str) -> bool:
    return jsonschema_rs.is_valid(schema, json.loads(text))


GRAMMARS: list[tuple[str, Callable[[str], object]]] = [
    *((grammars.of_json_schema(json.dumps(each)), partial(is_of_schema, each)) for each in SCHEMAS),
    (grammars.of_regex(REGEX), partial(re.fullmatch, REGEX)),
    (grammars.of_lark('start: "red" | "deep " start'), partial(re.fullmatch, "(deep )*red")),
]
"""Each with what is true of its texts alone."""
HOT = SamplingParams(96, 5, temperature=1.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    adapters = {f"r{rank}": {"rank": rank} for rank in range(1, 9)}
    return Setup(tmp_path_factory.mktemp("tiny"), "llama", adapters)


@pytest.fixture(scope="module")
def tokenizer(tiny: Setup) -> Tokenizer:
    return Tokenizer.from_file(str(tiny.model / "tokenizer.json"))


def request_of(tiny: Setup, number: int, grammar: str, params: SamplingParams = HOT) -> Generate:
    rng = random.Random(number)
    prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 40))]
    name = rng.choice([None, *tiny.refs])
    return Generate(
        number,
        str(number),
        tiny.digest,
        prompt,
        msgspec.structs.replace(params, seed=number),
        cache_domain="t",
        adapter=None if name is None else tiny.refs[name],
        tenant=f"t{number % 3}",
        grammar=grammar,
    )


def answers_of(tiny: Setup, requests: list[Generate], **changes: Any) -> Driver:
    with Driver(tiny.config(**changes)) as driver:
        driver.run(*requests)
    return driver


def text_of(tokenizer: Tokenizer, driver: Driver, number: int) -> str:
    return tokenizer.decode(driver.answers[number])


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_every_answer_is_valid_and_no_neighbour_changes(
    tiny: Setup, tokenizer: Tokenizer, runs_ahead: bool
) -> None:
    """32 sequences by 8 grammars and 8 adapters beside unconstrained ones, a random model at
    temperature 1, and so little memory that sequences are preempted and adapters evicted. The
    answers are those of the constrained alone with ample memory, and of the others alone."""
    refs, settings = list(tiny.refs.values()), {"ops": "cpu", "max_num_seqs": 48}
    constrained = [
        msgspec.structs.replace(
            request_of(tiny, n, GRAMMARS[n % 8][0]), adapter=refs[(n + n // 8) % 8]
        )
        for n in range(32)
    ]
    free = [request_of(tiny, n, "") for n in range(100, 112)]
    tight = {**settings, "runs_ahead": runs_ahead, "memory": 9 << 16, "max_loaded_adapters": 4}
    with Driver(tiny.config(**tight)) as mixed:
        # Else sequences come one by one, as their grammars are compiled, and memory lasts.
        first = msgspec.structs.replace(HOT, max_tokens=1)
        for number, (grammar, _) in enumerate(GRAMMARS):
            mixed.submit(request_of(tiny, 200 + number, grammar, first))
        mixed.wait()
        mixed.run(*random.Random(1).sample([*constrained, *free], 44))
    engine = mixed.worker.instances[tiny.digest].engine
    pool = mixed.worker.instances[tiny.digest].pool
    assert engine.scheduler.num_preemptions > 0 and pool.device.num_evictions > 0
    assert {n: answer for n, answer in mixed.answers.items() if n < 200} == {
        **answers_of(tiny, constrained, **settings).answers,
        **answers_of(tiny, free, **tight).answers,
    }
    ended = [n for n in range(32) if mixed.ended[n] is FinishReason.STOP]
    assert len(ended) >= 24
    for n in ended:
        text = text_of(tokenizer, mixed, n)
        assert GRAMMARS[n % 8][1](text), text
    assert all(mixed.ended[n] is FinishReason.LENGTH for n in range(32) if n not in ended)


def test_texts_of_a_grammar_or_an_expression(tiny: Setup, tokenizer: Tokenizer) -> None:
    """Penalties, min_tokens and ignore_eos bend none of it; a finished text ends."""
    bent = msgspec.structs.replace(
        HOT, min_tokens=50, ignore_eos=True, repetition_penalty=1.9, logit_bias={65: 100.0}
    )
    requests = [
        request_of(tiny, 0, grammars.of_regex("[0-9]{3}-[a-f]+x"), bent),
        request_of(tiny, 1, grammars.of_lark('start: "a" | "b" start'), bent),
        request_of(tiny, 2, grammars.of_lark('start: "red" | "green"'), bent),
    ]
    driver = answers_of(tiny, requests)
    assert driver.ended[2] is FinishReason.STOP
    assert text_of(tokenizer, driver, 2) in ("red", "green")
    for number, letters in ((0, "0123456789-abcdefx"), (1, "ab")):
        assert set(text_of(tokenizer, driver, number)) <= set(letters)


def test_a_resumed_sequence_goes_on_by_its_grammar(tiny: Setup) -> None:
    """From wherever an output ended."""
    request = request_of(tiny, 3, grammars.of_json_schema(json.dumps(SCHEMAS[0])))
    driver = answers_of(tiny, [request])
    whole = driver.answers[3]
    ends = list(accumulate(len(output.tokens) for output in driver.outputs[3]))
    for num_resumed in (ends[0], ends[len(ends) // 2], ends[-2]):
        resumed = msgspec.structs.replace(
            request, tokens=request.tokens + whole[:num_resumed], num_resumed=num_resumed
        )
        assert answers_of(tiny, [resumed]).answers[3] == whole[num_resumed:]


def test_what_alone_can_follow_is_not_drawn(
    tiny: Setup, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such tokens take no step each, and the rest is drawn as if they had."""
    # A busy machine may run the grammar's thread later than a step waits, and then they are drawn.
    monkeypatch.setattr(sequence_grammar, "WAIT_S", 60.0)
    grammar = grammars.of_regex("status: (o|l); this is all that is said")
    requests = [
        request_of(tiny, 0, grammar),
        request_of(tiny, 0, grammar, msgspec.structs.replace(HOT, logprobs=0)),
    ]
    drivers = [answers_of(tiny, [request]) for request in requests]
    texts = [text_of(tokenizer, driver, 0) for driver in drivers]
    num_outputs = [len(driver.outputs[0]) for driver in drivers]
    assert all(driver.ended[0] is FinishReason.STOP for driver in drivers)
    assert texts[0] == texts[1] and "; this is all" in texts[0]
    assert num_outputs[0] <= 3 < len(texts[1]) <= num_outputs[1]
    assert drivers[1].outputs[0][0].logprobs is not None


@pytest.mark.parametrize(
    "grammar",
    [
        grammars.of_json_schema('{"not": {"type": "integer"}}'),
        grammars.of_regex("(?<=x)a"),
        grammars.of_lark("start: missing"),
        "no grammar at all {",
    ],
)
def test_a_grammar_that_does_not_compile_ends_its_request_alone(tiny: Setup, grammar: str) -> None:
    driver = answers_of(tiny, [request_of(tiny, 0, grammar), request_of(tiny, 1, "")])
    assert driver.ended[0] is ErrorCode.INVALID
    assert driver.ended[1] in (FinishReason.STOP, FinishReason.LENGTH)


def test_a_model_without_a_known_tokenizer_refuses_grammars(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "llama", {})
    (setup.model / "tokenizer.json").unlink()
    driver = answers_of(setup, [request_of(setup, 0, grammars.of_regex("a"))])
    assert driver.ended[0] is ErrorCode.INVALID
