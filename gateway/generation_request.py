"""The neutral request: what is asked of a model, the same for every dialect."""

from __future__ import annotations

import msgspec

from gateway.messages import Message


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request for generated text. None: the adapter's default, the model's, or ours.

    Either `messages` is set, a conversation for the chat template, or `prompts` has an entry a
    prompt, each text or token ids.
    """

    model: str
    messages: list[Message] | None = None
    prompts: list[str | list[int]] = []
    echo: bool = False
    """Whether each prompt is shown, and scored if log-probabilities are asked for, before its
    answer."""
    stream: bool = False
    num_choices: int = 1
    """Answers to each prompt."""
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    num_logprobs: int | None = None
    """Likeliest tokens shown beside each one; 0: the token's own log-probability; None: none."""
    priority: int = 0
    cache_salt: str = ""
    user: str | None = None
    """Splits canaries; None: the API key does."""
