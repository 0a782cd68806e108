"""Defines the routes of Anthropic's Messages API."""

from __future__ import annotations

from litestar.types import ASGIApp

from gateway.dialects.messages import Messages
from gateway.dialects.messages_fields import (
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
)
from gateway.http.request import INFERENCE, HttpRequest
from gateway.http.routes.completions import answer, answering, dropped_header
from gateway.http.routes.tokens import max_counted, tokenizer_of
from gateway.http.routing import Answer, post
from gateway.limits.bounds import check_template_arguments, check_tools

MESSAGES = Messages()


@answering("/v1/messages")
async def create_message(request: HttpRequest, data: MessagesRequest) -> ASGIApp:
    """Answers a conversation, as one message or as a stream of its blocks."""
    return await answer(request, MESSAGES, data)


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
