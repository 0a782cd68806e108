"""Text to token ids and back, as the completion routes do it."""

from __future__ import annotations

import msgspec
from litestar import post

from gateway.catalog.auth import INFERENCE, requires
from gateway.catalog.catalog import ResolvedModel
from gateway.dialects.schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from gateway.exceptions import ContextLengthExceeded, InvalidRequest
from gateway.http.request import GatewayRequest
from gateway.text.tokenizer import ModelTokenizer

MIN_COUNTED = 1 << 15
"""Tokens that both routes take though the context has fewer; far more would take gigabytes."""
MAX_TEXT_BYTES = 2 << 20
"""Of the text of an answer: far more would wait in memory for a client that does not read it."""

TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


@post("/tokenize", guards=[requires(INFERENCE)], status_code=200)
async def tokenize(request: GatewayRequest) -> TokenizeResponse:
    """The ids that a prompt or a conversation becomes."""
    asked = await request.decode(TOKENIZE)
    target, tokenizer = await _tokenizer(request, asked.model)
    if asked.messages is not None:
        with_prompt = asked.add_generation_prompt is not False
        tokens = await tokenizer.encode_chat(
            asked.messages,
            domain=request.user.cache_domain,
            template=target.chat_template(),
            add_generation_prompt=with_prompt,
            max_tokens=_most(target),
        )
    else:
        with_specials = asked.add_special_tokens is not False
        (tokens,) = await tokenizer.encode_many(
            [asked.prompt or ""],
            domain=request.user.cache_domain,
            add_special_tokens=with_specials,
            max_tokens=_most(target),
        )
    return TokenizeResponse(
        count=len(tokens), max_model_len=target.base.max_model_len, tokens=tokens
    )


@post("/detokenize", guards=[requires(INFERENCE)], status_code=200)
async def detokenize(request: GatewayRequest) -> DetokenizeResponse:
    """The text of token ids, special tokens included."""
    asked = await request.decode(DETOKENIZE)
    target, tokenizer = await _tokenizer(request, asked.model)
    size, most = target.base.shape.vocab_size, _most(target)
    if len(asked.tokens) > most:
        raise ContextLengthExceeded(
            f"At most {most} tokens are taken for this model; you sent {len(asked.tokens)}.",
            param="tokens",
        )
    if asked.tokens and max(asked.tokens) >= size:
        raise InvalidRequest(f"Token ids must be below {size}.", param="tokens")
    prompt = await tokenizer.decode(
        asked.tokens, domain=request.user.cache_domain, max_bytes=MAX_TEXT_BYTES
    )
    return DetokenizeResponse(prompt=prompt)


def _most(target: ResolvedModel) -> int:
    return max(target.base.max_model_len, MIN_COUNTED)


async def _tokenizer(request: GatewayRequest, model: str) -> tuple[ResolvedModel, ModelTokenizer]:
    caller = request.user
    target = await request.gateway.catalog.resolve(caller, model, caller.key.id)
    return target, await request.gateway.tokenizers.get(target.base.digest)
