"""Constraint of the tokens that a sequence may draw, as scheduler, engine and sampler see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workers.wire.protocol import Generate

NO_TOKENS: frozenset[int] = frozenset()


class Constraint(Protocol):
    """Constraint of one sequence, positioned after its last token. Used on the engine thread.

    While a constraint `needs_host_token`, `advance` is called with its drawn tokens, then
    `forced`. In between, the constraints of a step may work on other threads. Otherwise its mask
    and bans never change.
    """

    @property
    def is_ready(self) -> bool:
        """Whether `mask` and `banned` hold for the next token. Until then, the sequence is in no
        step."""
        ...

    @property
    def failure(self) -> str | None:
        """Reason why no token can follow, valid once the constraint is ready; None if one can."""
        ...

    @property
    def mask(self) -> NDArray[Any] | None:
        """Mask of the tokens that may follow, as in `SampleInput`; None allows all."""
        ...

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that must not follow, unless the mask allows no other."""
        ...

    @property
    def needs_host_token(self) -> bool:
        """Whether mask and bans depend on the tokens, so that the last token must be known before
        the next one is drawn, and the sequence is in no step ahead."""
        ...

    def advance(self, tokens: list[int]) -> None:
        """Starts to follow generated tokens, after which the sequence has not ended."""
        ...

    def forced(self) -> list[int]:
        """Returns tokens that are the only continuation, which the constraint has followed. Waits
        for them only briefly: later, they are drawn instead. Called without the memory lock."""
        ...

    def close(self) -> None:
        """Called when the sequence has ended, in any state."""
        ...


class NoConstraint:
    """Simplest `Constraint`: any token may follow."""

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
        """Returns why the request cannot be constrained as it asks, or None."""
        ...

    def open(self, request: Generate, generated: Sequence[int]) -> Constraint:
        """Returns the constraint of a request that was not refused. generated: tokens that another
        worker generated for it."""
        ...


class Unconstrained:
    """Simplest `ConstraintSource`: refuses requests that ask for a constraint."""

    def refusal(self, request: Generate) -> str | None:
        is_constrained = request.grammar or request.params.rules is not None
        return "this engine cannot constrain tokens" if is_constrained else None

    def open(self, request: Generate, generated: Sequence[int]) -> Constraint:
        return NO_CONSTRAINT


def effective_bans(banned: frozenset[int], mask: NDArray[Any] | None) -> frozenset[int]:
    """Returns the banned tokens, or none of them if the mask allows no other token."""
    if mask is None or not banned:
        return banned
    left = np.unpackbits(mask.view(np.uint8), bitorder="little")
    left[list(banned)] = 0
    return banned if left.any() else NO_TOKENS
