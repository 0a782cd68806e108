"""Grammars as they travel to a worker: in llguidance's JSON, compiled within the same bounds by the
gateway, which refuses them by name, and by the worker, which generates by them.

llguidance may crash or take gigabytes on a grammar that a stranger wrote. Whatever compiles one
does so in a sandbox first (`grammar_checks`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
"""Between the tokens of JSON: a model that writes nothing else does not go on for ever."""
STEP_FUEL = 28_000
"""Work of the lexer for the mask of one token at most: about 2 ms."""


def limits() -> LLParserLimits:
    """The bounds of compiling a grammar, and of each mask. Counted, so that a grammar is refused or
    not whatever else the machine does."""
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=5_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def of_json_schema(schema: str) -> str:
    """The grammar of a JSON Schema given as JSON text. Raises ValueError if it is not an object or
    a boolean. What `x-guidance` in the schema says is overridden."""
    given = json.loads(schema)
    if given is False:
        raise ValueError("nothing fits the schema 'false'")
    if given is True:
        schema = "{}"
    elif not isinstance(given, dict):
        raise ValueError("a JSON Schema is an object or a boolean")
    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "whitespace_flexible": True,
            "whitespace_pattern": WHITESPACE,
            "item_separator": ",",
            "key_separator": ":",
            "coerce_one_of": False,
            "lenient": False,
        },
    )


def of_regex(regex: str) -> str:
    """The grammar of a regular expression in the syntax of Rust's regex crate."""
    return LLMatcher.grammar_from_regex(regex)


def of_lark(lark: str) -> str:
    """The grammar of llguidance's variant of Lark. Raises ValueError for one that is given in its
    JSON, which could say more than a grammar."""
    if lark.lstrip().startswith("{"):
        raise ValueError("a Lark grammar begins with a rule")
    return LLMatcher.grammar_from_lark(lark)


def is_lark(grammar: str) -> bool:
    """Whether it was given in Lark. A token of it can take as long as all `step_max_items` do:
    up to a second where many rules may be empty."""
    return not grammar.startswith("{")


def read_tokenizer(path: str, vocab_size: int, end_tokens: Sequence[int]) -> LLTokenizer:
    """Reads a model's tokenizer.json. vocab_size: columns of the model's logits. Raises ValueError
    if grammars cannot be compiled for it."""
    return LLTokenizer(path, n_vocab=vocab_size, eos_token=list(end_tokens) or None)


def refusal(grammar: str, tokenizer: LLTokenizer | None = None) -> str | None:
    """Returns why the grammar cannot be compiled, or None if it can. With a tokenizer the mask of
    the first token is computed too."""
    if tokenizer is None:
        reason = LLMatcher.validate_grammar(grammar, None, limits=limits())
    else:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        reason = matcher.get_error() if matcher.is_error() else ""
    if "coerce_one_of" in reason:
        return "oneOf of schemas that the same value may fit cannot be held to; use anyOf"
    return reason or None
