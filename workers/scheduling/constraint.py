"""Interface of the constraints on the tokens that a sequence may draw, as scheduler, engine and
sampler use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workers.wire.protocol import Generate

NO_TOKENS: frozenset[int] = frozenset()


class Constraint(Protocol):
    """Constraint on one sequence's next token, given all tokens before it. Used only on the engine
    thread.

    While `needs_host_token` is true, the engine calls `advance` with the tokens that the sequence
    has drawn, and then `forced`. Between the two calls, the constraint may work on other threads.
    Once `needs_host_token` is false, `mask` and `banned` no longer change.
    """

    @property
    def is_ready(self) -> bool:
        """Whether `mask` and `banned` are up to date for the next token. Until they are, the
        sequence is not scheduled."""
        ...

    @property
    def failure(self) -> str | None:
        """Reason why no token can follow, or None if a token can. Valid once the constraint is
        ready."""
        ...

    @property
    def mask(self) -> NDArray[Any] | None:
        """Mask of the tokens that may follow, in the format of `SampleInput.mask`; None allows all
        tokens."""
        ...

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that must not follow, unless the mask allows no other token."""
        ...

    @property
    def needs_host_token(self) -> bool:
        """Whether `mask` and `banned` depend on the sequence's tokens. If they do, the host must
        know the last token before the next one is drawn. While the step that draws the last token
        is in flight, the sequence is then left out of the next step."""
        ...

    def advance(self, tokens: list[int]) -> None:
        """Starts to advance the constraint by the tokens that the sequence has drawn. Not called if
        the sequence ends with these tokens."""
        ...

    def forced(self) -> list[int]:
        """Returns the next tokens if the constraint allows only these. The constraint has already
        advanced by these tokens. Waits only briefly: a forced token that is not found in time is
        drawn like any other token. Called without the memory lock."""
        ...

    def close(self) -> None:
        """Releases the constraint. Called when the sequence has ended, even if the constraint is
        not ready."""
        ...


class NoConstraint:
    """Implementation of `Constraint` that allows every token."""

    is_ready = True
    failure = None
    mask = None
    banned = NO_TOKENS
    needs_host_token = False

    def advance(self, tokens: list[int]) -> None:
        pass

    def forced(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


NO_CONSTRAINT = NoConstraint()


class ConstraintSource(Protocol):
    """Source of the constraints of a model's requests."""

    def refusal(self, request: Generate) -> str | None:
        """Returns why the request's constraint is not supported, or None if it is supported."""
        ...

    def open(self, request: Generate, generated: Sequence[int]) -> Constraint:
        """Returns the constraint of a request that was not refused. generated: tokens that another
        worker has generated for the request."""
        ...


class Unconstrained:
    """Implementation of `ConstraintSource` that refuses all requests with a constraint."""

    def refusal(self, request: Generate) -> str | None:
        is_constrained = request.grammar or request.params.rules is not None
        return "this engine cannot constrain tokens" if is_constrained else None

    def open(self, request: Generate, generated: Sequence[int]) -> Constraint:
        return NO_CONSTRAINT


def effective_bans(banned: frozenset[int], mask: NDArray[Any] | None) -> frozenset[int]:
    """Returns the banned tokens, or no tokens if the mask allows only banned tokens."""
    if mask is None or not banned:
        return banned
    left = np.unpackbits(mask.view(np.uint8), bitorder="little")
    left[list(banned)] = 0
    return banned if left.any() else NO_TOKENS
