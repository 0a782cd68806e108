"""Defines routes that convert text to token ids and back, or count them, as the routes that workers
answer do."""

from __future__ import annotations

from gateway.catalog.resolved_model import ResolvedModel
from gateway.dialects.chat_messages import neutral_messages, read_tools
from gateway.dialects.dropped import header_of
from gateway.dialects.history import ConversationReader
from gateway.dialects.messages_fields import CountTokensRequest, TokenCount
from gateway.dialects.token_ids import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from gateway.exceptions import ContextLengthExceeded, InvalidRequest
from gateway.http.request import INFERENCE, HttpRequest
from gateway.http.routes.answers import MESSAGES, dropped_header
from gateway.http.routing import Answer, post
from gateway.limits.bounds import check_template_arguments, check_tools
from gateway.request import Conversation
from gateway.text.tokenizer import ModelTokenizer

MIN_COUNTED = 1 << 15
"""Minimum limit on the tokens that these routes accept. The limit is the model's context if that is
longer, so that clients can measure texts that are too long for a short context."""
MAX_TEXT_BYTES = 2 << 20
"""Maximum bytes of the text in an answer of `/detokenize`. The whole text is in memory until the
client has read it."""


@post("/tokenize", needs=INFERENCE)
async def tokenize(request: HttpRequest, data: TokenizeRequest) -> Answer[TokenizeResponse]:
    """Returns the token ids of a prompt or a conversation."""
    target, tokenizer = await tokenizer_of(request, data.model)
    reader = ConversationReader()
    for name in request.dropped:
        reader.drop(name)
    if data.messages is not None:
        conversation = Conversation(
            neutral_messages(data.messages, reader),
            read_tools(data.tools, reader),
            data.add_generation_prompt is not False and not data.continue_final_message,
            bool(data.continue_final_message),
            template_arguments=data.chat_template_kwargs or {},
        )
        check_tools(conversation.tools)
        check_template_arguments(conversation.template_arguments)
        tokens, change, _ = await tokenizer.encode_chat(
            conversation,
            domain=request.caller.cache_domain,
            template=target.chat_template(),
            max_tokens=max_counted(target),
            add_special_tokens=bool(data.add_special_tokens),
        )
        if change:
            reader.drop(change)
    else:
        with_specials = data.add_special_tokens is not False
        (tokens,) = await tokenizer.encode_many(
            [data.prompt or ""],
            domain=request.caller.cache_domain,
            add_special_tokens=with_specials,
            max_tokens=max_counted(target),
        )
    answer = TokenizeResponse(
        count=len(tokens),
        max_model_len=target.base.max_model_len,
        tokens=tokens,
        token_strs=tokenizer.token_strings(tokens) if data.return_token_strs else None,
    )
    dropped = reader.dropped
    return Answer(answer, headers=[(b"loraplex-dropped", header_of(dropped))] if dropped else [])


@post("/detokenize", needs=INFERENCE)
async def detokenize(request: HttpRequest, data: DetokenizeRequest) -> Answer[DetokenizeResponse]:
    """Returns the text of token ids, special tokens included."""
    target, tokenizer = await tokenizer_of(request, data.model)
    size, most = target.base.shape.vocab_size, max_counted(target)
    if len(data.tokens) > most:
        raise ContextLengthExceeded(
            f"At most {most} tokens are taken for this model; you sent {len(data.tokens)}.",
            param="tokens",
        )
    if data.tokens and max(data.tokens) >= size:
        raise InvalidRequest(f"Token ids must be below {size}.", param="tokens")
    prompt = await tokenizer.decode(
        data.tokens, domain=request.caller.cache_domain, max_bytes=MAX_TEXT_BYTES
    )
    return Answer(DetokenizeResponse(prompt=prompt))


@post("/v1/messages/count_tokens", needs=INFERENCE)
async def count_message_tokens(
    request: HttpRequest, data: CountTokensRequest
) -> Answer[TokenCount]:
    """Returns the number of tokens in a conversation's prompt, which may exceed the context."""
    neutral = MESSAGES.count(data).with_dropped(*request.dropped)
    target, tokenizer = await tokenizer_of(request, neutral.model)
    check_tools(neutral.tools, neutral.tool_choice, neutral.dropped)
    check_template_arguments(neutral.template_arguments)
    tokens, change, _ = await tokenizer.encode_chat(
        neutral.conversation,
        domain=request.caller.cache_domain,
        template=target.chat_template(),
        max_tokens=max_counted(target),
    )
    if change:
        neutral = neutral.with_dropped(change)
    return Answer(TokenCount(len(tokens)), headers=dropped_header(neutral))


def max_counted(target: ResolvedModel) -> int:
    """Returns the maximum number of tokens that these routes convert at once."""
    return max(target.base.max_model_len, MIN_COUNTED)


async def tokenizer_of(request: HttpRequest, model: str) -> tuple[ResolvedModel, ModelTokenizer]:
    """Returns the model that the caller names, and its tokenizer. Raises ModelNotFound."""
    caller = request.caller
    target = await request.gateway.catalog.resolve(caller, model, caller.who.id)
    return target, await request.gateway.tokenizers.get(target.base.digest)
