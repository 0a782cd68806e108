"""How large one request may be: each prompt with its answer against the model's context, and all
prompts and choices together."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.exceptions import ContextLengthExceeded, InvalidRequest

MAX_REQUEST_TOKENS = 1 << 18
"""Prompt tokens of one request, each counted once a choice: a worker is sent so many ids. A single
prompt may fill a context that is longer than this."""
MAX_TOKEN_IDS = 1 << 20
"""Of one prompt: more than any context; to look at ten times as many would hold up the loop."""
MAX_LOGPROBS = 1 << 17
"""Log-probabilities of one answer, the likeliest others of each token included: some 10 MB of JSON.
A worker tells those of a prompt in one frame, which takes 25 ms to read."""
MAX_ECHO_CHARS = 4 << 20
"""Characters of prompts that one answer repeats."""


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


def check_answer(num_scored: int, num_top: int | None, num_echoed: int) -> None:
    """Checks an answer before it is begun: `num_scored` tokens with `num_top` others each, and the
    characters that it repeats. Raises InvalidRequest."""
    total = 0 if num_top is None else num_scored * (num_top + 1)
    if total > MAX_LOGPROBS:
        raise InvalidRequest(
            f"An answer may have {MAX_LOGPROBS} log-probabilities; yours could have {total}: "
            f"{num_scored} tokens with {num_top} others each. Ask for fewer, set 'max_tokens', or "
            "stream the answer: then only those of echoed prompts count.",
            param="logprobs",
            code="answer_too_large",
        )
    if num_echoed > MAX_ECHO_CHARS:
        raise InvalidRequest(
            f"An answer may repeat {MAX_ECHO_CHARS} characters of prompts; yours would repeat "
            f"{num_echoed}. Send fewer prompts or choices in one request.",
            param="echo",
            code="answer_too_large",
        )
