"""What a request may take: reserved before it runs, settled when it has ended, whatever happened.

So far the bounds of the model's context; quotas enter between the same two calls.
"""

from __future__ import annotations

import msgspec

from gateway.errors import ContextLengthExceeded


class Usage(msgspec.Struct, frozen=True):
    """What a request took, in tokens. Each prompt counts once, however many choices it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Reservation(msgspec.Struct, frozen=True):
    """`max_tokens` has one entry a prompt, which each of its `num_choices` may take."""

    tenant_id: str
    prompt_tokens: int
    max_tokens: list[int]
    num_choices: int


class Admission:
    def __init__(self) -> None:
        self.num_open = 0
        """Reservations not settled yet."""

    def reserve(
        self,
        tenant_id: str,
        prompt_lengths: list[int],
        *,
        asked_tokens: int | None,
        default_tokens: int,
        num_choices: int,
        max_model_len: int,
    ) -> Reservation:
        """ContextLengthExceeded if a prompt with its answer cannot fit; then takes nothing."""
        max_tokens = [
            _fit(length, asked_tokens, default_tokens, max_model_len) for length in prompt_lengths
        ]
        self.num_open += 1
        return Reservation(
            tenant_id=tenant_id,
            prompt_tokens=sum(prompt_lengths),
            max_tokens=max_tokens,
            num_choices=num_choices,
        )

    def settle(self, reservation: Reservation, usage: Usage) -> None:
        """Exactly once for each reservation."""
        self.num_open -= 1


def _fit(prompt: int, asked: int | None, default: int, max_model_len: int) -> int:
    room = max_model_len - prompt
    wanted = min(default, max(room, 1)) if asked is None else asked
    if wanted > room:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {prompt + wanted} tokens "
            f"({prompt} in the prompt, {wanted} in the completion)."
        )
    return wanted
