"""How large one request may be: each prompt with its answer against the model's context, and all
prompts and choices together."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.errors import ContextLengthExceeded, InvalidRequest

MAX_REQUEST_TOKENS = 1 << 18
"""Prompt tokens of one request, each counted once a choice: a worker is sent so many ids. A single
prompt may fill a context that is longer than this."""


def completion_tokens(prompt: int, asked: int | None, default: int, max_model_len: int) -> int:
    """Tokens that an answer to `prompt` tokens may have. Raises ContextLengthExceeded."""
    room = max_model_len - prompt
    wanted = min(default, max(room, 1)) if asked is None else asked
    if wanted > room:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {prompt + wanted} tokens "
            f"({prompt} in the prompt, {wanted} in the completion)."
        )
    return wanted


def check_total(
    lengths: Sequence[int], num_choices: int, max_model_len: int, *, param: str
) -> None:
    """Checks all prompts together, by their lengths in tokens or by the fewest that they can have.
    Raises InvalidRequest."""
    total, most = sum(lengths) * num_choices, max(MAX_REQUEST_TOKENS, max_model_len)
    if total > most:
        raise InvalidRequest(
            f"A request may have {most} prompt tokens, each counted once a choice; yours has "
            f"{total}. Send fewer prompts or choices in one request.",
            param=param,
            code="request_too_large",
        )
