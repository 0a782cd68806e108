"""Follows grammars of strangers as a worker does. Each is written to standard error before it is
compiled, because it may end the process.

`python -m tests.workers.constraints.hostile_walks FOLDER EXAMPLES`
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from threading import Event

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.exceptions import InvalidRequest
from gateway.text.grammar_limits import check_expression, check_lark, check_schema
from tests import hostile_grammars
from tests.doubles import make_tokenizer
from workers.constraints.grammars import Grammars
from workers.constraints.sequence_grammar import GrammarThreads, SequenceGrammar
from workers.wire import grammars

VOCAB, END = 260, 257
NUM_TOKENS = 24

texts = st.one_of(
    hostile_grammars.schemas.map(lambda text: ("schema", text)),
    hostile_grammars.expressions.map(lambda text: ("expression", text)),
    hostile_grammars.larks.map(lambda text: ("lark", text)),
)


def main() -> None:
    folder, num_examples = Path(sys.argv[1]), int(sys.argv[2])
    make_tokenizer(folder)
    threads = GrammarThreads()
    opened = Grammars(folder / "tokenizer.json", VOCAB, frozenset([END]), threads)

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(texts)
    def follow(kind_and_text: tuple[str, str]) -> None:
        if (grammar := accepted(*kind_and_text)) is not None:
            print(kind_and_text[0], kind_and_text[1][:200], file=sys.stderr, flush=True)
            walk(opened.open(grammar, "t", "request", []))

    follow()
    opened.close()
    threads.close()


def accepted(kind: str, text: str) -> str | None:
    """Returns the grammar that a gateway would compile."""
    if len(text) > 256 << 10:
        return None
    try:
        match kind:
            case "schema":
                check_schema(json.loads(text), param=kind)
                return grammars.of_json_schema(text)
            case "expression":
                check_expression(text, param=kind)
                return grammars.of_regex(text)
            case _:
                check_lark(text, param=kind)
                return grammars.of_lark(text)
    except (InvalidRequest, RecursionError):
        return None


def walk(grammar: SequenceGrammar) -> None:
    rng, pause = random.Random(0), Event()
    for _ in range(NUM_TOKENS):
        while not grammar.is_ready:
            pause.wait(0.001)
        if grammar.failure is not None or grammar.mask is None:
            return
        bits = np.unpackbits(grammar.mask.view(np.uint8), bitorder="little")[:VOCAB]
        token = int(rng.choice(np.flatnonzero(bits).tolist() or [END]))
        if token == END:
            return
        grammar.advance([token])
        if END in grammar.forced():
            return


if __name__ == "__main__":
    main()
