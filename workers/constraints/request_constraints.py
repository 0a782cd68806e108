"""Builds the constraints of a model's requests from the requests' grammars and token rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from workers.constraints.grammars import Grammars
from workers.constraints.token_limits import TokenLimits
from workers.scheduling.constraint import NO_CONSTRAINT, Constraint
from workers.wire.protocol import Generate


class RequestConstraints:
    """Implementation of `ConstraintSource` for grammars and token rules."""

    def __init__(self, vocab_size: int, grammars: Grammars | None) -> None:
        """grammars: compiler of the model's grammars. If it is None, requests with a grammar are
        refused."""
        self._vocab_size = vocab_size
        self._grammars = grammars

    def refusal(self, request: Generate) -> str | None:
        if request.grammar and self._grammars is None:
            return "this model's tokenizer cannot be constrained"
        return None

    def open(self, request: Generate, generated: Sequence[int]) -> Constraint:
        limits = grammar = None
        params = request.params
        if params.rules is not None:
            limits = TokenLimits(params.rules, self._vocab_size, generated)
        if request.grammar and self._grammars is not None:
            grammar = self._grammars.open(
                *(request.grammar, request.tenant, request.request_id, list(generated)),
                # A forced token is not sampled, so it would have no log-probability.
                forces=params.logprobs is None,
            )
        if grammar is not None and limits is not None:
            return LimitedGrammar(grammar, limits)
        return grammar or limits or NO_CONSTRAINT


class LimitedGrammar:
    """Implementation of `Constraint` for a grammar together with token rules. The rules ban tokens
    and limit the length of a thought. When the thought must end, the mask of the rules replaces the
    grammar's mask. This is safe, because every grammar for an answer with a thought allows the
    token that ends the thought."""

    needs_host_token = True

    def __init__(self, grammar: Constraint, limits: TokenLimits) -> None:
        self._grammar = grammar
        self._limits = limits

    @property
    def is_ready(self) -> bool:
        return self._grammar.is_ready

    @property
    def failure(self) -> str | None:
        return self._grammar.failure

    @property
    def mask(self) -> NDArray[Any] | None:
        mask = self._limits.mask
        return self._grammar.mask if mask is None else mask

    @property
    def banned(self) -> frozenset[int]:
        return self._limits.banned

    def advance(self, tokens: list[int]) -> None:
        self._grammar.advance(tokens)
        self._limits.advance(tokens)

    def forced(self) -> list[int]:
        forced = self._grammar.forced()
        self._limits.advance(forced)
        return forced

    def close(self) -> None:
        self._grammar.close()
