"""Text to token ids and back, as the completion routes do it."""

from __future__ import annotations

import msgspec
from litestar import post

from gateway.auth import INFERENCE, requires
from gateway.catalog import Target
from gateway.errors import InvalidRequest
from gateway.request import GatewayRequest
from gateway.schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    decode_request,
)
from gateway.tokenizer import ModelTokenizer

MIN_COUNTED = 1 << 15
"""Tokens that may be counted though the context has fewer; far more would take gigabytes."""

TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


@post("/tokenize", guards=[requires(INFERENCE)], status_code=200)
async def tokenize(request: GatewayRequest) -> TokenizeResponse:
    """The ids that a prompt or a conversation becomes."""
    asked = decode_request(TOKENIZE, await request.body())
    target, tokenizer = await _tokenizer(request, asked.model)
    if asked.messages is not None:
        with_prompt = asked.add_generation_prompt is not False
        tokens = await tokenizer.encode_chat(
            asked.messages,
            domain=request.user.cache_domain,
            template=target.chat_template(),
            add_generation_prompt=with_prompt,
            max_tokens=max(target.base.max_model_len, MIN_COUNTED),
        )
    else:
        with_specials = asked.add_special_tokens is not False
        (tokens,) = await tokenizer.encode_many(
            [asked.prompt or ""],
            domain=request.user.cache_domain,
            add_special_tokens=with_specials,
            max_tokens=max(target.base.max_model_len, MIN_COUNTED),
        )
    return TokenizeResponse(
        count=len(tokens), max_model_len=target.base.max_model_len, tokens=tokens
    )


@post("/detokenize", guards=[requires(INFERENCE)], status_code=200)
async def detokenize(request: GatewayRequest) -> DetokenizeResponse:
    """The text of token ids, special tokens included."""
    asked = decode_request(DETOKENIZE, await request.body())
    target, tokenizer = await _tokenizer(request, asked.model)
    size = target.base.shape.vocab_size
    if asked.tokens and max(asked.tokens) >= size:
        raise InvalidRequest(f"Token ids must be below {size}.", param="tokens")
    prompt = await tokenizer.decode(asked.tokens, domain=request.user.cache_domain)
    return DetokenizeResponse(prompt=prompt)


async def _tokenizer(request: GatewayRequest, model: str) -> tuple[Target, ModelTokenizer]:
    caller = request.user
    target = await request.gateway.catalog.resolve(caller, model, caller.key.id)
    return target, await request.gateway.tokenizers.get(target.base.digest)
