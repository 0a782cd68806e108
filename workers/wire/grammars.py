"""Grammars in llguidance's format, as sent to a worker. The gateway compiles a grammar to refuse
the request with a reason if the grammar is invalid. The worker compiles it to constrain generation.
Both use the same limits.

llguidance may crash or use gigabytes on an untrusted grammar, so every grammar is first compiled in
a sandbox (`grammar_checks`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
"""Regular expression of the whitespace between JSON tokens, bounded so that a model cannot generate
whitespace for ever."""
STEP_FUEL = 28_000
"""Maximum work of the lexer for the mask of one token, in llguidance's units. This much work takes
about 2 ms."""


def limits() -> LLParserLimits:
    """Returns the limits for compiling a grammar and for computing a mask. The limits count
    operations instead of seconds, so that the result does not depend on the load of the machine."""
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
    """Returns the grammar of a JSON Schema, which is given as JSON text. Raises ValueError unless
    the schema is an object or `true`. Overrides any `x-guidance` options in the schema."""
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
    """Returns the grammar of a regular expression in the syntax of Rust's regex crate."""
    return LLMatcher.grammar_from_regex(regex)


def of_lark(lark: str) -> str:
    """Returns the grammar that a text in llguidance's variant of Lark describes. Raises ValueError
    for a text in llguidance's JSON format, because that format can express more than a grammar."""
    if lark.lstrip().startswith("{"):
        raise ValueError("a Lark grammar begins with a rule")
    return LLMatcher.grammar_from_lark(lark)


def is_lark(grammar: str) -> bool:
    """Returns whether the grammar was given in Lark. Such a grammar may be slow: if many of its
    rules match the empty text, the mask of one token can take up to a second within the limits."""
    return not grammar.startswith("{")


def read_tokenizer(path: str, vocab_size: int, end_tokens: Sequence[int]) -> LLTokenizer:
    """Reads a model's tokenizer.json. vocab_size: number of columns of the model's logits. Raises
    ValueError if the tokenizer cannot be used with grammars."""
    return LLTokenizer(path, n_vocab=vocab_size, eos_token=list(end_tokens) or None)


def refusal(grammar: str, tokenizer: LLTokenizer | None = None) -> str | None:
    """Returns the reason why the grammar cannot be compiled, or None if it can. If a tokenizer is
    given, this function also computes the mask of the first token."""
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
