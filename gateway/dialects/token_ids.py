"""Defines the bodies of vLLM's /tokenize and /detokenize, which convert text to ids and back."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from gateway.dialects.chat_messages import Messages, Tools, check_end
from gateway.dialects.generation_fields import TokenId
from gateway.exceptions import InvalidRequest


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: a text as in a completion, or messages as in a chat."""

    example: ClassVar[dict[str, Any]] = {"model": "support-bot", "prompt": "Once"}

    model: str
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens. Default: true for a text, and false for
    messages, whose chat template writes its own."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    """Whether the answer also has `token_strs`, the tokens as the vocabulary spells them."""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Give either 'prompt' or 'messages'.", param="prompt")
        check_end(self.continue_final_message, self.add_generation_prompt)


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    example: ClassVar[dict[str, Any]] = {"model": "support-bot", "tokens": [12, 7]}

    model: str
    tokens: list[TokenId]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str
