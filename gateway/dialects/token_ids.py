"""vLLM's /tokenize and /detokenize: text to token ids and back."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from gateway.dialects.chat_messages import ChatTool, Messages
from gateway.dialects.openai_fields import TokenId
from gateway.exceptions import InvalidRequest


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a text as a completion's prompt, or messages as a chat's."""

    example: ClassVar[dict[str, Any]] = {"model": "support-bot", "prompt": "Once"}

    model: str
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[ChatTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Give either 'prompt' or 'messages'.", param="prompt")


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    example: ClassVar[dict[str, Any]] = {"model": "support-bot", "tokens": [12, 7]}

    model: str
    tokens: list[TokenId]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str
