"""What an answer is held to, as a grammar that a worker generates by, or refused by name."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import msgspec

from gateway.exceptions import InvalidRequest
from gateway.generation_request import Constraint
from gateway.text.call_grammars import MARKERS, AnswerRules, HeldGrammar, grammar_of
from gateway.text.json_schemas import held_schema
from gateway.text.long_texts import LongTexts
from workers.wire import grammars

MAX_CACHED = 1024
MAX_CACHED_BYTES = 16 << 20
"""Length of the grammars that are kept, in characters together."""


class Grammars:
    """Grammars that were found to compile, the newest in use. Compiled beside the event loop, one
    at a time for each tenant."""

    def __init__(self) -> None:
        self._threads = LongTexts()
        self._compiled: OrderedDict[bytes, HeldGrammar] = OrderedDict()
        self._num_bytes = 0

    async def of(self, constraint: Constraint | None, domain: str) -> HeldGrammar:
        """The grammar; empty for no constraint. domain: of the tenant. Raises InvalidRequest."""
        if constraint is None:
            return HeldGrammar()
        return await self._made(constraint, domain, lambda: compile_constraint(constraint))

    async def of_rules(
        self, rules: AnswerRules, special: Callable[[str], int | None], domain: str
    ) -> HeldGrammar:
        """The grammar of an answer with tools or thoughts. `special`: as `grammar_of` has it.
        Raises InvalidRequest."""
        ids = [special(marker) for marker in MARKERS]
        return await self._made((rules, ids), domain, lambda: compile_rules(rules, special))

    async def _made(
        self, source: object, domain: str, make: Callable[[], HeldGrammar]
    ) -> HeldGrammar:
        """The grammar of a `source`, which is encoded as the key that it is kept under."""
        key = hashlib.sha256(msgspec.json.encode((type(source).__name__, source))).digest()
        held = self._compiled.get(key)
        if held is not None:
            self._compiled.move_to_end(key)
            return held
        held = await self._threads.run(domain, make)
        self._keep(key, held)
        return held

    def _keep(self, key: bytes, held: HeldGrammar) -> None:
        if key not in self._compiled:
            self._compiled[key] = held
            self._num_bytes += len(held.grammar)
        while len(self._compiled) > MAX_CACHED or self._num_bytes > MAX_CACHED_BYTES:
            _, oldest = self._compiled.popitem(last=False)
            self._num_bytes -= len(oldest.grammar)


def compile_constraint(constraint: Constraint) -> HeldGrammar:
    """The constraint as a grammar. Raises InvalidRequest, which says what is not supported."""
    return _compiled(partial(_grammar_of, constraint), lambda reason: _refused(constraint, reason))


def compile_rules(rules: AnswerRules, special: Callable[[str], int | None]) -> HeldGrammar:
    """The rules as a grammar. Raises InvalidRequest, which says what is not supported."""
    return _compiled(partial(grammar_of, rules, special), _refused_tools)


def _grammar_of(constraint: Constraint) -> HeldGrammar:
    match constraint.kind:
        case "json_schema":
            held = held_schema(constraint.text, is_strict=constraint.strict)
            dropped = frozenset(f"{constraint.param}.{keyword}" for keyword in held.dropped)
            return HeldGrammar(grammars.of_json_schema(held.text), dropped)
        case "regex":
            return HeldGrammar(grammars.of_regex(constraint.text))
        case "lark":
            return HeldGrammar(grammars.of_lark(constraint.text))


def _compiled(
    make: Callable[[], HeldGrammar], refused: Callable[[str], InvalidRequest]
) -> HeldGrammar:
    try:
        held = make()
    except ValueError as error:
        raise refused(str(error)) from None
    if (reason := grammars.refusal(held.grammar)) is not None:
        raise refused(reason)
    return held


def _refused_tools(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"The schemas of the tools cannot be held to: {reason[:500]}",
        param="tools",
        code="unsupported_constraint",
    )


def _refused(constraint: Constraint, reason: str) -> InvalidRequest:
    what = {"json_schema": "JSON Schema", "regex": "regular expression", "lark": "grammar"}
    shown = reason if len(reason) <= 500 else reason[:500] + "..."
    return InvalidRequest(
        f"The {what[constraint.kind]} of the answer cannot be used: {shown}",
        param=constraint.param,
        code="unsupported_constraint",
    )
