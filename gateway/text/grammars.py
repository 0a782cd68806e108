"""Compiles and caches the grammars that constrain which tokens a worker may generate."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from gateway.exceptions import InvalidRequest
from gateway.request import Constraint
from gateway.text.call_grammars import (
    MARKERS,
    AnswerRules,
    HeldGrammar,
    arguments_grammar,
    grammar_of,
)
from gateway.text.grammar_limits import check_lark, check_schema
from gateway.text.json_schemas import held_schema
from gateway.text.long_texts import LongTexts
from workers.wire import grammars
from workers.wire.grammar_checks import GrammarChecks
from workers.wire.recent_refusals import RecentRefusals

log = logging.getLogger(__name__)

MAX_COMPILING = 2
MAX_CACHED = 1024
MAX_BLAMED = 16
"""Maximum number of tools that are compiled alone to find one that is refused."""
MAX_CACHED_BYTES = 16 << 20
"""Maximum total length of the cached grammars, in characters."""


class GrammarUser(NamedTuple):
    """Request for which a grammar is compiled, and the request's tenant."""

    request_id: str
    tenant_id: str
    domain: str


class Grammars:
    """Cache of compiled grammars. Grammars are compiled in a sandbox, one at a time for each
    tenant."""

    def __init__(self) -> None:
        self._threads = LongTexts(MAX_COMPILING)
        self._checks = GrammarChecks()
        self._refusals: RecentRefusals[InvalidRequest] = RecentRefusals()
        self._compiled: OrderedDict[bytes, HeldGrammar] = OrderedDict()
        self._num_bytes = 0

    async def of(self, constraint: Constraint, user: GrammarUser) -> HeldGrammar:
        """Returns a constraint's grammar. Raises InvalidRequest if the constraint is unusable."""
        return await self._find(constraint, user, lambda: self._compile_constraint(constraint))

    async def of_rules(
        self, rules: AnswerRules, special: Callable[[str], int | None], user: GrammarUser
    ) -> HeldGrammar:
        """Returns the grammar of an answer with tools or thoughts. `special` returns the token id
        of a marker, or None if the model has no special token for it. Raises InvalidRequest if a
        tool's schema cannot be used."""
        ids = [special(marker) for marker in MARKERS]
        return await self._find((rules, ids), user, lambda: self._compile_rules(rules, special))

    def close(self) -> None:
        self._checks.close()

    async def _find(
        self, source: object, user: GrammarUser, compile: Callable[[], HeldGrammar]
    ) -> HeldGrammar:
        """Returns the grammar of `source`, from the cache if it was compiled before. The cache key
        is a digest of the source as JSON."""
        key = hashlib.sha256(msgspec.json.encode((type(source).__name__, source))).digest()
        if (held := self._known(key)) is not None:
            self._compiled.move_to_end(key)
            return held

        def compile_once() -> HeldGrammar:
            # An earlier request of the tenant may have compiled the grammar while this request
            # waited.
            if (held := self._known(key)) is not None:
                return held
            try:
                return compile()
            except InvalidRequest as error:
                self._refusals.remember(key, error)
                raise

        # The grammar is logged before it is compiled, so that one that crashes the process can be
        # traced to its request.
        log.info(
            "compiling a grammar",
            extra={"request_id": user.request_id, "tenant": user.tenant_id, "digest": key.hex()},
        )
        held = await self._threads.run(user.domain, compile_once)
        self._keep(key, held)
        return held

    def _known(self, key: bytes) -> HeldGrammar | None:
        """Returns a cached grammar, or None if it is not cached. Raises InvalidRequest if the
        grammar was refused recently."""
        if (refused := self._refusals.find(key)) is not None:
            raise refused.with_traceback(None)
        return self._compiled.get(key)

    def _keep(self, key: bytes, held: HeldGrammar) -> None:
        if key not in self._compiled:
            self._compiled[key] = held
            self._num_bytes += len(held.grammar)
        while len(self._compiled) > MAX_CACHED or self._num_bytes > MAX_CACHED_BYTES:
            _, oldest = self._compiled.popitem(last=False)
            self._num_bytes -= len(oldest.grammar)

    def _compile_constraint(self, constraint: Constraint) -> HeldGrammar:
        return self._compile(
            lambda: _grammar_of(constraint), lambda reason: _refused(constraint, reason)
        )

    def _compile_rules(
        self, rules: AnswerRules, special: Callable[[str], int | None]
    ) -> HeldGrammar:
        for tool in rules.tools:
            try:
                check_schema(rules.schema_of(tool), param="tools")
            except InvalidRequest as error:
                raise InvalidRequest(f"Tool '{tool.name}': {error}", param="tools") from None

        def refused(reason: str) -> InvalidRequest:
            return _refused_tools(self._blamed(rules) + reason)

        return self._compile(lambda: grammar_of(rules, special), refused)

    def _blamed(self, rules: AnswerRules) -> str:
        """Returns the beginning of a message that names the first tool whose schema is refused
        alone. Returns an empty string if there is none among the first MAX_BLAMED, or if the
        message names the tool already."""
        for tool in rules.tools[:MAX_BLAMED]:
            try:
                grammar, _ = arguments_grammar(rules, tool)
            except ValueError:
                break
            if self._checks.refusal(grammar) is not None:
                return f"tool '{tool.name}': "
        return ""

    def _compile(
        self, make: Callable[[], HeldGrammar], refused: Callable[[str], InvalidRequest]
    ) -> HeldGrammar:
        try:
            held = make()
        except ValueError as error:
            raise refused(str(error)) from None
        if (reason := self._checks.refusal(held.grammar)) is not None:
            raise refused(reason)
        return held


def _grammar_of(constraint: Constraint) -> HeldGrammar:
    text, param = constraint.text, constraint.param
    match constraint.kind:
        case "json_schema":
            check_schema(json.loads(text), param=param)
            schema = held_schema(text, is_strict=constraint.strict, is_closed=constraint.is_closed)
            dropped = frozenset(f"{param}.{keyword}" for keyword in schema.dropped)
            return HeldGrammar(grammars.of_json_schema(schema.text), dropped)
        case "regex":
            return HeldGrammar(grammars.of_regex(text))
        case "lark":
            check_lark(text, param=param)
            return HeldGrammar(grammars.of_lark(text))


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
