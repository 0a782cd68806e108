"""Translates OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from gateway.dialects.chat_messages import (
    ChatToolChoice,
    Messages,
    Tools,
    check_end,
    neutral_choice,
    neutral_messages,
    read_tools,
)
from gateway.dialects.dialect import Answer, AnswerContext, Dialect
from gateway.dialects.history import ConversationReader
from gateway.dialects.openai_fields import Count, OpenAIRequest, Refusal, Wish
from gateway.dialects.openai_format import OpenAIFormat, encode, scored_token
from gateway.dispatch.choice import Delta, Scored
from gateway.exceptions import InvalidRequest
from gateway.request import Request, ThoughtBudget
from gateway.text.parsers.parser import Reasoning, Text, ToolCall, join_parts
from workers.wire.protocol import ALL_TOKENS

ThoughtTokens = Annotated[int, Meta(ge=-1, lt=1 << 31)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatCompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    example: ClassVar[dict[str, Any]] = {
        "model": "support-bot",
        "messages": [{"role": "user", "content": "Where is my parcel?"}],
        "max_tokens": 64,
    }

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=ALL_TOKENS, le=20)] | None = None
    """-1 requests all tokens of the vocabulary, within the limit of log-probabilities."""
    tools: Tools | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    """Variable of the chat template. "none" sets `enable_thinking` to false instead."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    """If false, the answer does not show thoughts."""
    thinking_token_budget: ThoughtTokens | None = None
    """Maximum tokens of a thought, which is ended at this length. -1 sets no limit."""
    thinking_budget: ThoughtTokens | None = None
    """Name of `thinking_token_budget` in Qwen's clients."""

    echo: bool | None = None
    """Whether the answer begins with the last message's content, if the assistant wrote it."""

    prediction: Annotated[Any, Wish()] = None
    prompt_cache_options: Annotated[Any, Wish()] = None
    prompt_cache_retention: Annotated[Literal["in_memory", "24h"] | None, Wish(("in_memory",))] = (
        None
    )
    verbosity: Annotated[Literal["low", "medium", "high"] | None, Wish(("medium",))] = None

    add_special_tokens: Annotated[
        bool | None, Refusal("The chat template writes them.", (False,))
    ] = None
    audio: Annotated[Any, Refusal("Answers are text.")] = None
    chat_template: Annotated[
        Any, Refusal("Templates are the model's or the adapter version's.")
    ] = None
    documents: Annotated[Any, Refusal("Put them into the messages.")] = None
    function_call: Annotated[Any, Refusal("Its successor is `tool_choice`.", ("none", "auto"))] = (
        None
    )
    functions: Annotated[Any, Refusal("Their successor is `tools`.")] = None
    mm_processor_kwargs: Annotated[Any, Refusal("Prompts are text.")] = None
    modalities: Annotated[Any, Refusal("Answers are text.", (["text"],))] = None
    moderation: Annotated[Any, Refusal("Nothing is moderated.")] = None
    web_search_options: Annotated[Any, Refusal("Nothing is searched.", takes_empty=False)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_min_tokens(self.max_completion_tokens or self.max_tokens)
        for param in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, param) and not self.logprobs:
                raise InvalidRequest(f"'{param}' needs 'logprobs': true.", param=param)
        check_end(self.continue_final_message, self.add_generation_prompt)

    @property
    def thought_budget(self) -> ThoughtBudget | None:
        """Maximum tokens of a thought, or None if there is no limit. Raises InvalidRequest if
        `thinking_budget` and `thinking_token_budget` are both set and differ."""
        param, given = "thinking_token_budget", self.thinking_token_budget
        if self.thinking_budget is not None:
            if given not in (None, self.thinking_budget):
                raise InvalidRequest(
                    "'thinking_budget' and 'thinking_token_budget' are the same, and differ.",
                    param="thinking_budget",
                )
            param, given = "thinking_budget", self.thinking_budget
        return None if given in (None, -1) else ThoughtBudget(given, param)

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Variables of the chat template. `chat_template_kwargs` overrides `reasoning_effort`."""
        arguments: dict[str, Any] = {}
        if self.reasoning_effort == "none":
            arguments["enable_thinking"] = False
        elif self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
        return arguments | (self.chat_template_kwargs or {})


class ChatFormat(OpenAIFormat):
    chunk_kind = "chat.completion.chunk"
    body_kind = "chat.completion"
    tells_prompt_once = True

    def __init__(self, *args: Any, shows_thoughts: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shows_thoughts = shows_thoughts
        self._begun: set[int] = set()

    def chunk(self, delta: Delta) -> bytes:
        """Returns the chunks of a delta. The first chunk of a choice has the role. The last chunk
        has an empty delta and the finish reason."""
        chunks: list[bytes] = []
        if delta.index not in self._begun:
            chunks.append(self._role(delta))
            self._begun.add(delta.index)
        if delta.parts or delta.scored or (self._token_ids and delta.tokens):
            piece = msgspec.structs.replace(delta, finish_reason=None, stop=None)
            chunks.append(self._chunk(delta.index, self._delta(delta), self._end(piece)))
        if delta.finish_reason is not None:
            last = msgspec.structs.replace(delta, scored=[], tokens=[])
            chunks.append(self._chunk(delta.index, b"{}", self._end(last)))
        return b"".join(chunks)

    def _role(self, delta: Delta) -> bytes:
        """Returns the first chunk of a choice. The first chunk of the stream also has the prompt's
        token ids, if token ids are requested."""
        end = self._bare_end(msgspec.structs.replace(delta, num_tokens=0, num_thought_tokens=0))
        if not self._begun:
            end = end.removesuffix(b"}\n\n") + self._told_prompt(delta) + b"}\n\n"
        return self._chunk(delta.index, b'{"role":"assistant","content":""}', end)

    def _chunk(self, index: int, delta: bytes, end: bytes) -> bytes:
        return b'%s{"index":%d,"delta":%s%s' % (self._head, index, delta, end)

    def _delta(self, delta: Delta) -> bytes:
        if all(type(part) is Text for part in delta.parts):
            return b'{"content":%s}' % encode(delta.text)
        shown: dict[str, Any] = {}
        for part in join_parts(delta.parts):
            match part:
                case Text(text):
                    shown["content"] = shown.get("content", "") + text
                case Reasoning() if not self._shows_thoughts:
                    pass
                case Reasoning(text):
                    shown["reasoning"] = shown["reasoning_content"] = text
                case ToolCall():
                    shown.setdefault("tool_calls", []).append(_call_delta(part))
        return encode(shown)

    def _content(self, answer: Answer) -> dict[str, Any]:
        parts = answer.parts
        calls = [_whole_call(part) for part in parts if isinstance(part, ToolCall)]
        thoughts = [part.text for part in parts if isinstance(part, Reasoning)]
        reasoning = "".join(thoughts) if thoughts and self._shows_thoughts else None
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.text or (None if calls else ""),
            "refusal": None,
            "annotations": [],
            "reasoning": reasoning,
            "reasoning_content": reasoning,
        }
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def _logprobs_of(self, index: int, scored: list[Scored]) -> dict[str, Any]:
        return {
            "content": [
                scored_token(self._spelled, entry, as_ids=self._tokens_as_ids) for entry in scored
            ],
            "refusal": None,
        }


def _call_delta(part: ToolCall) -> dict[str, Any]:
    """Returns a piece of a tool call. Only the first piece has the call's id and name."""
    told = _whole_call(part) if part.name else {"function": {"arguments": part.arguments}}
    return {"index": part.index, **told}


def _whole_call(part: ToolCall) -> dict[str, Any]:
    id = f"call_{secrets.token_hex(12)}"
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": id, "type": "function", "function": function}


class ChatCompletions(Dialect[ChatCompletionRequest]):
    id_prefix = "chatcmpl"

    def read(self, body: ChatCompletionRequest) -> Request:
        reader = ConversationReader()
        fields = body.neutral_fields()
        messages, tools = neutral_messages(body.messages, reader), read_tools(body.tools, reader)
        choice = neutral_choice(body.tool_choice, reader)
        fields["dropped"] = tuple(sorted({*body.dropped, *reader.dropped}))
        return Request(
            **fields,
            messages=messages,
            echo=bool(body.echo),
            tools=tools,
            tool_choice=choice,
            is_parallel=body.parallel_tool_calls is not False,
            add_generation_prompt=(
                not body.continue_final_message and body.add_generation_prompt is not False
            ),
            continue_final_message=bool(body.continue_final_message),
            template_arguments=body.template_arguments,
            thought_budget=body.thought_budget,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            max_tokens_param="max_completion_tokens"
            if body.max_completion_tokens
            else "max_tokens",
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )

    def answer_format(self, body: ChatCompletionRequest, context: AnswerContext) -> ChatFormat:
        return ChatFormat(
            f"{self.id_prefix}-{context.request_id}",
            body,
            context.spelled,
            logprobs=bool(body.logprobs),
            shows_thoughts=body.include_reasoning is not False,
        )
