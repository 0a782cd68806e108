"""Sandbox process that compiles grammars. It is started with `python -m
workers.wire.grammar_sandbox [TOKENIZER VOCAB_SIZE END_TOKEN...]`. If a tokenizer is given, the
process also computes the mask of each grammar's first token."""

from __future__ import annotations

import sys

import msgspec
from llguidance import LLTokenizer

from sandbox.server import serve
from workers.wire.grammars import read_tokenizer, refusal


def main() -> None:
    tokenizer: LLTokenizer | None = None
    if arguments := sys.argv[1:]:
        path, vocab_size, *end_tokens = arguments
        tokenizer = read_tokenizer(path, int(vocab_size), list(map(int, end_tokens)))
    serve(lambda work: msgspec.json.encode(refusal(msgspec.json.decode(work, type=str), tokenizer)))


if __name__ == "__main__":
    main()
