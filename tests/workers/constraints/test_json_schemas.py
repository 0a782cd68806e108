"""Whatever fits no schema is never generated: random answers against an independent validator.

`json_schema_suite.json` has the schemas of draft 2020-12 of the JSON Schema Test Suite
(https://github.com/json-schema-org/JSON-Schema-Test-Suite), each once; its licence lies beside it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tests.doubles import make_tokenizer
from workers.wire import grammars

SUITE: list[Any] = json.loads((Path(__file__).parent / "json_schema_suite.json").read_text())
MAX_TOKENS = 200
CLOSING = (b'"', b"]", b"}")
Draw = Callable[[st.SearchStrategy[Any]], Any]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return LLTokenizer(str(folder / "tokenizer.json"), eos_token=[257])


class Walk:
    """Random tokens of a grammar until the answer may end, as of even logits at temperature 1."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str, seed: int) -> None:
        rng = random.Random(seed)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=grammars.limits())
        tokens: list[int] = []
        self.text: str | None = None
        """None: it did not end within MAX_TOKENS, or the work for a mask was bounded."""
        while len(tokens) < MAX_TOKENS:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            if matcher.is_error():
                return
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
            if tokenizer.eos_token in allowed and (len(allowed) == 1 or rng.random() < 0.5):
                self.text = tokenizer.decode_bytes(tokens).decode()
                return
            allowed = [token for token in allowed if token != tokenizer.eos_token]
            # Strings would hardly ever end.
            ends = [token for token in allowed if tokenizer.decode_bytes([token]) in CLOSING]
            token = rng.choice(ends if ends and rng.random() < 0.3 else allowed)
            assert matcher.consume_token(token), matcher.get_error()
            tokens.append(token)


def judge(schema: Any, text: str) -> None:
    # Decimals: a number beyond a float is valid JSON, and infinite as a float.
    value = json.loads(text, parse_float=Decimal)
    jsonschema_rs.Draft202012Validator(schema).validate(value)


def test_no_answer_is_invalid_by_the_suite_of_json_schema(tokenizer: LLTokenizer) -> None:
    num_whole, refused = 0, Counter[str]()
    for number, schema in enumerate(SUITE):
        try:
            grammar = grammars.of_json_schema(json.dumps(schema))
            reason = grammars.refusal(grammar)
        except ValueError as error:
            grammar, reason = "", str(error)
        if reason is not None:
            refused[reason.partition(":")[0]] += 1
            if reason.startswith("Unimplemented keys: "):
                keys = json.loads(reason.removeprefix("Unimplemented keys: "))
                # What a reference to the metaschema asks for stands there.
                text = json.dumps(schema)
                assert all(f'"{key}":' in text or "json-schema.org" in text for key in keys)
            continue
        for seed in range(4):
            walk = Walk(tokenizer, grammar, 4 * number + seed)
            if walk.text is not None:
                num_whole += 1
                judge(schema, walk.text)
    print(num_whole, refused)
    assert num_whole > 500
    # More than this would be what the product refuses beside what llguidance does.
    assert sum(refused.values()) <= 199


def bounds(draw: Draw, least: str, most: str, limit: int) -> dict[str, int]:
    """Either, both or none, in order."""
    low, high = sorted((draw(st.integers(0, limit)), draw(st.integers(0, limit))))
    return {name: value for name, value in ((least, low), (most, high)) if draw(st.booleans())}


@st.composite
def schemas(draw: Draw, depth: int = 3) -> dict[str, Any]:
    """Schemas that some value fits."""
    kinds = ["enum", "string", "pattern", "integer", "number", "boolean", "null"]
    if depth:
        kinds += ["array", "object", "anyOf"] * 2
    inner = schemas(depth - 1)
    match draw(st.sampled_from(kinds)):
        case "enum":
            return {"enum": draw(st.lists(values(), min_size=1, max_size=4))}
        case "string":
            return {"type": "string", **bounds(draw, "minLength", "maxLength", 8)}
        case "pattern":
            patterns = ["^[A-Z]{2}[0-9]+$", "a|b+", "^(yes|no)$", r"^\d{4}-\d{2}$"]
            return {"type": "string", "pattern": draw(st.sampled_from(patterns))}
        case "integer" | "number" as kind:
            return {"type": kind, **bounds(draw, "minimum", "maximum", 1000)}
        case "array":
            return {
                "type": "array",
                "items": draw(inner),
                **bounds(draw, "minItems", "maxItems", 3),
            }
        case "object":
            properties = draw(st.dictionaries(st.sampled_from('abcdé"\\'), inner, max_size=3))
            required = [name for name in properties if draw(st.booleans())]
            rest = draw(st.sampled_from([{}, {"additionalProperties": False}]))
            return {"type": "object", "properties": properties, "required": required, **rest}
        case "anyOf":
            return {"anyOf": draw(st.lists(inner, min_size=1, max_size=3))}
        case kind:
            return {"type": kind}


def values() -> st.SearchStrategy[Any]:
    return st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=4)


@settings(max_examples=150, deadline=None)
@given(schema=schemas(), seed=st.integers(0, 1 << 30))
def test_no_answer_is_invalid_by_a_random_schema(
    tokenizer: LLTokenizer, schema: dict[str, Any], seed: int
) -> None:
    grammar = grammars.of_json_schema(json.dumps(schema))
    assert grammars.refusal(grammar) is None
    walk = Walk(tokenizer, grammar, seed)
    if walk.text is not None:
        judge(schema, walk.text)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("false", "nothing fits"),
        ("3", "an object or a boolean"),
        ('{"oneOf": [{"type": "string"}, {"maxLength": 3}]}', "use anyOf"),
    ],
)
def test_what_cannot_be_held_is_refused_with_what_to_do(schema: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        raise ValueError(grammars.refusal(grammars.of_json_schema(schema)))
