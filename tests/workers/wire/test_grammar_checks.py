"""Grammars that would end or fill a process: they are refused, and only a fork ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.doubles import make_tokenizer
from tests.hostile_grammars import (
    DOUBLES,
    EXPRESSIONS,
    RULES,
    WRAPS,
    chain,
    deep,
    hidden,
    pattern,
    properties,
    rules,
)
from workers.wire import grammars
from workers.wire.grammar_checks import REASONS, GrammarChecks

CRASHES = {
    "references": grammars.of_json_schema(chain("%s", 2_500)),
    "references four deep": grammars.of_json_schema(chain(deep(WRAPS["anyOf"], 4), 1_000)),
    "lists of references": grammars.of_json_schema(chain(deep(WRAPS["items"], 4), 1_000)),
    "rules": grammars.of_lark(rules(RULES["rules"], 2_700)),
    "optional rules": grammars.of_lark(rules(RULES["optional rules"], 2_700)),
    "terminals": grammars.of_lark(rules(RULES["optional terminals"], 5_000)),
    "properties": grammars.of_json_schema(properties(12_000)),
}
"""Grammars that overflow the stack."""
DOUBLED = grammars.of_json_schema(chain(DOUBLES["allOf"], 30, pattern("a")))
"""A schema of 2 KB that takes gigabytes."""
COSTLY = {
    "optional": grammars.of_regex(EXPRESSIONS["a?"](20_000)),
    "hidden": grammars.of_lark(f'start: "x" T\nT: /{"a?" * 8_000}/'),
    "doubled terminals": grammars.of_lark(rules(RULES["two terminals"], 16)),
    "references": DOUBLED,
}
"""Grammars that take seconds or gigabytes with a tokenizer."""
ACCEPTED = {
    "references": grammars.of_json_schema(chain(WRAPS["properties"], 40)),
    "recursive": grammars.of_json_schema('{"type":"array","items":{"$ref":"#"}}'),
    "values": grammars.of_json_schema(json.dumps({"enum": [f"v{n}" for n in range(10_000)]})),
    "properties": grammars.of_json_schema(hidden(properties(400))),
    "alternatives": grammars.of_regex(EXPRESSIONS["alternatives"](1_000)),
    "rules": grammars.of_lark(rules(RULES["rules"], 100)),
}


@pytest.fixture(scope="module")
def without_tokenizer() -> Iterator[GrammarChecks]:
    """As a gateway checks."""
    checks = GrammarChecks()
    yield checks
    checks.close()


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarChecks]:
    """As a worker checks."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    make_tokenizer(folder)
    checks = GrammarChecks(str(folder / "tokenizer.json"), "260", "257")
    yield checks
    checks.close()


def sandboxes() -> set[int]:
    found = set[int]()
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # Another test's child may be ending.
            if "workers.wire.grammar_sandbox" in process.cmdline():
                found.add(process.pid)
    return found


@pytest.mark.parametrize("grammar", CRASHES.values(), ids=CRASHES)
def test_a_grammar_that_overflows_the_stack_is_refused(
    without_tokenizer: GrammarChecks, grammar: str
) -> None:
    assert without_tokenizer.refusal(grammars.of_regex("a")) is None
    before = sandboxes()
    assert without_tokenizer.refusal(grammar) in REASONS.values()
    assert sandboxes() == before


@pytest.mark.parametrize("grammar", COSTLY.values(), ids=COSTLY)
def test_a_grammar_that_takes_too_much_is_refused(
    with_tokenizer: GrammarChecks, grammar: str
) -> None:
    assert with_tokenizer.refusal(grammar) in REASONS.values()


@pytest.mark.parametrize("grammar", ACCEPTED.values(), ids=ACCEPTED)
def test_a_large_grammar_is_accepted(
    without_tokenizer: GrammarChecks, with_tokenizer: GrammarChecks, grammar: str
) -> None:
    assert without_tokenizer.refusal(grammar) is None
    assert with_tokenizer.refusal(grammar) is None


def test_a_reason_is_the_compilers_own(without_tokenizer: GrammarChecks) -> None:
    assert "missing" in (without_tokenizer.refusal(grammars.of_lark("start: missing")) or "")
