"""Request fields for sampling and for ending an answer, as in OpenAI's APIs and vLLM."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.exceptions import InvalidRequest

Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Priority = Annotated[int, Meta(ge=-100, le=100)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_BIASES = 300
"""Maximum entries of `logit_bias`, because each is copied to every step's input."""
MAX_ALLOWED = 4096
MAX_BAD_WORDS = 256


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that chats, completions and responses share."""

    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)
        ]
        | None
    ) = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED)] | None = None
    """Ids of the only tokens that are generated. An empty list has no effect."""
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] | None = None
    """Texts that are not generated, with or without a space before them."""
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    skip_special_tokens: bool | None = None
    """If false, the text contains special tokens."""
    include_stop_str_in_output: bool | None = None
    """Whether the text includes the stop string that ended the answer."""

    def sampling(self) -> dict[str, Any]:
        """Returns these fields in the form of the neutral request."""
        return {
            "min_tokens": self.min_tokens or 0,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop or [],
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": bool(self.ignore_eos),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias or None,
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
            "bad_words": self.bad_words or [],
            "seed": self.seed,
            "priority": self.priority or 0,
            "cache_salt": self.cache_salt or "",
            "skip_special_tokens": self.skip_special_tokens is not False,
            "shows_stop": bool(self.include_stop_str_in_output),
        }

    def check_min_tokens(self, max_tokens: int | None, name: str = "max_tokens") -> None:
        """Raises InvalidRequest if `min_tokens` exceeds `max_tokens`. `name`: the request's field
        that `max_tokens` came from."""
        if max_tokens is not None and (self.min_tokens or 0) > max_tokens:
            raise InvalidRequest(
                f"'min_tokens' is {self.min_tokens}, and '{name}' only {max_tokens}.",
                param="min_tokens",
            )
