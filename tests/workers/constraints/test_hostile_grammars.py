"""A worker given grammars that would end or hold it up."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles import make_tokenizer
from tests.hostile_grammars import DOUBLES, RULES, chain, pattern, rules
from tests.preloaded import ROOT
from tests.scale import scaled
from tests.waiting import until
from workers.constraints.grammars import Grammars
from workers.constraints.sequence_grammar import GrammarThreads, SequenceGrammar
from workers.wire import grammars
from workers.wire.grammar_checks import REASONS

EXAMPLES = scaled(25, 4_000)
SLOW = [
    grammars.of_lark(rules(RULES["two terminals"], 16) + f"\nrule{number}: R0")
    for number in range(5)
]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Grammars]:
    make_tokenizer(tmp_path)
    threads = GrammarThreads()
    opened = Grammars(tmp_path / "tokenizer.json", 260, frozenset([257]), threads)
    yield opened
    threads.close()
    opened.close()


def await_ready(grammar: SequenceGrammar) -> SequenceGrammar:
    until(lambda: grammar.is_ready)
    return grammar


@pytest.mark.parametrize(
    "grammar",
    [
        grammars.of_json_schema(chain("%s", 2_500)),
        grammars.of_json_schema(chain(DOUBLES["allOf"], 30, pattern("a"))),
        grammars.of_lark(rules(RULES["rules"], 2_700)),
        grammars.of_regex("a?" * 20_000),
    ],
    ids=["references", "doubled", "rules", "optional"],
)
def test_a_worker_outlives_what_a_gateway_let_through(
    opened: Grammars, grammar: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names request and tenant before anything is compiled, which is done once."""
    with caplog.at_level(logging.INFO):
        assert await_ready(opened.open(grammar, "acme", "req_1", [])).failure in REASONS.values()
    assert "for request req_1 of tenant acme" in caplog.text
    with caplog.at_level(logging.INFO):
        again = await_ready(opened.open(grammar, "other", "req_3", []))
    assert again.failure in REASONS.values() and "req_3" not in caplog.text
    assert await_ready(opened.open(grammars.of_regex("a"), "acme", "req_2", [])).failure is None


def test_slow_grammars_of_one_tenant_hold_up_no_other(opened: Grammars) -> None:
    await_ready(opened.open(grammars.of_regex("a"), "acme", "req", []))
    slow = [opened.open(grammar, "acme", "req", []) for grammar in SLOW]
    for letter in "bcd":
        assert (
            await_ready(opened.open(grammars.of_regex(letter), letter, "req", [])).failure is None
        )
    assert not slow[-1].is_ready
    assert all(await_ready(grammar).failure in REASONS.values() for grammar in slow)


@pytest.mark.full
def test_no_grammar_ends_a_worker(tmp_path: Path) -> None:
    """What a gateway accepts is followed in a child that may die."""
    command = (sys.executable, "-m", "tests.workers.constraints.hostile_walks")
    done = subprocess.run(
        [*command, str(tmp_path), str(EXAMPLES)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
