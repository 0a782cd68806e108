"""Grammars whose tokens take long: they are left out of steps, and hold up none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from threading import Event
from time import thread_time
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.waiting import until
from workers.constraints import sequence_grammar
from workers.constraints.grammars import Grammars
from workers.constraints.sequence_grammar import GrammarThreads, SequenceGrammar
from workers.wire import grammars

MAX_CPU_S = 0.02
"""CPU time of the engine's thread in one step, in seconds, whatever the grammars."""
WORDS = ["".join(letters) for n in range(1, 10) for letters in product("ab", repeat=n)]
VOCAB = [*'x{}[]":,pq 0123456789', *WORDS, "<end>"]
IDS = {word: number for number, word in enumerate(VOCAB)}


def hidden(schema: dict[str, Any]) -> str:
    """What is slow does not come with the first token."""
    outer = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return grammars.of_json_schema(json.dumps({**outer, "additionalProperties": False}))


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    return schema


BOMBS = [
    grammars.of_lark('start: "x" ' + " ".join(['("a"|"b")*'] * 3000)),
    grammars.of_lark('start: "x" e\ne: e e e e | e e e | e e | "a" | "b" | "ab" |'),
    grammars.of_regex("x(a+)+(b{900}a{900}){900}"),
    grammars.of_regex("x(.*(a|b).{12}){3}"),
    hidden({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}}),
    hidden(deep(11)),
    hidden({"enum": [str(n) for n in range(20_000)]}),
]
QUICK = grammars.of_regex("x[ab]*")


@pytest.fixture
def threads() -> Iterator[GrammarThreads]:
    threads = GrammarThreads()
    yield threads
    threads.close()


@pytest.fixture
def opened(tmp_path: Path, threads: GrammarThreads) -> Iterator[Grammars]:
    tokenizer = Tokenizer(models.BPE(vocab=IDS, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    end = frozenset([IDS["<end>"]])
    opened = Grammars(tmp_path / "tokenizer.json", len(VOCAB), end, threads)
    yield opened
    opened.close()


def begin(opened: Grammars, *texts: str) -> list[SequenceGrammar]:
    begun = [opened.open(text, "t", "request", []) for text in texts]
    for grammar in begun:
        await_ready(grammar)
    return begun


def await_ready(grammar: SequenceGrammar) -> None:
    until(lambda: grammar.is_ready)


def first_allowed(grammar: SequenceGrammar) -> int:
    assert grammar.mask is not None
    return next(t for t in range(len(VOCAB)) if grammar.mask[t // 32] >> (t % 32) & 1)


@pytest.mark.parametrize("bomb", BOMBS)
def test_the_engine_spends_no_time_on_a_bomb(opened: Grammars, bomb: str) -> None:
    (grammar,) = begin(opened, bomb)
    for _ in range(12):
        if grammar.failure is not None:
            break
        begun_s = thread_time()
        grammar.advance([first_allowed(grammar)])
        forced = grammar.forced()
        assert thread_time() - begun_s < MAX_CPU_S
        await_ready(grammar)
        assert forced == [] or grammar.failure is None


def test_a_step_does_not_wait_for_a_slow_grammar(opened: Grammars, threads: GrammarThreads) -> None:
    """What it forces is then drawn: the mask allows nothing else."""
    slow, quick = begin(opened, grammars.of_lark('start: "x" "a" "b"'), QUICK)
    is_free = Event()
    threads.slow.submit(is_free.wait)
    try:
        for grammar in (slow, quick):
            grammar.advance([IDS["x"]])
        assert slow.forced() == []
        await_ready(quick)
        assert not slow.is_ready
    finally:
        is_free.set()
    await_ready(slow)
    assert VOCAB[first_allowed(slow)] in ("a", "ab")


@pytest.mark.parametrize("num_others", [1, 20])
def test_one_that_turns_out_to_be_slow_holds_up_neither_the_step_nor_other_grammars(
    opened: Grammars, num_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first in the queue, which nobody knows to be slow, does not end."""
    waits_s: list[float] = []
    wait = sequence_grammar.wait

    def waited(futures: list[Future[None]], timeout: float) -> Any:
        waits_s.append(timeout)
        return wait(futures, timeout)

    monkeypatch.setattr(sequence_grammar, "wait", waited)
    first, *others = begin(opened, *[QUICK] * (num_others + 1))
    is_free = Event()
    monkeypatch.setattr(first, "_go_on", lambda: is_free.wait(60))
    try:
        for _ in range(3):
            for grammar in (first, *others) if first.is_ready else others:
                grammar.advance([IDS["x"]] if not waits_s else [first_allowed(grammar)])
            before = len(waits_s)
            others[0].forced()
            assert sum(waits_s[before:]) <= 0.005
            for grammar in others:
                await_ready(grammar)
                grammar.forced()
            assert not first.is_ready
    finally:
        is_free.set()
    await_ready(first)
