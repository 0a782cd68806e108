"""Translates OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, ClassVar, Literal, TypeVar

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
    template_variables,
)
from gateway.dialects.dialect import Answer, AnswerContext, Dialect
from gateway.dialects.history import ConversationReader
from gateway.dialects.openai_fields import MaxTokens, OpenAIRequest, Refusal, Wish, most_tokens
from gateway.dialects.openai_format import OpenAIFormat, encode, scored_token
from gateway.dispatch.sequence import Delta, Scored
from gateway.exceptions import InvalidRequest
from gateway.request import Request, ThoughtBudget
from gateway.text.parsers.parser import Reasoning, Text, ToolCall, join_parts
from workers.wire.protocol import ALL_TOKENS

T = TypeVar("T")
ThoughtTokens = Annotated[int, Meta(ge=-1, lt=1 << 31)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ThinkingSwitch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["enabled", "adaptive", "auto", "disabled"] | None = None
    budget_tokens: ThoughtTokens | None = None
    """Maximum tokens of a thought. Dropped if the model's thoughts cannot be limited."""


class ReasoningSwitch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: ReasoningEffort | None = None
    max_tokens: ThoughtTokens | None = None
    """Maximum tokens of a thought. Dropped if the model's thoughts cannot be limited."""
    enabled: bool | None = None
    exclude: bool | None = None
    """If true, the answer does not show thoughts."""


BUDGETS = {"thinking": "thinking.budget_tokens", "reasoning": "reasoning.max_tokens"}
"""Names by which the header `loraplex-dropped` reports budgets that cannot be enforced, by field.
Agents send such a budget to every model."""


class ChatCompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    example: ClassVar[dict[str, Any]] = {
        "model": "support-bot",
        "messages": [{"role": "user", "content": "Where is my parcel?"}],
        "max_tokens": 64,
    }

    messages: Messages
    max_tokens: MaxTokens | None = None
    """-1 counts as absent."""
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=ALL_TOKENS, le=20)] | None = None
    """-1 requests all tokens of the vocabulary, within the limit of log-probabilities."""
    tools: Tools | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    """Variable of the chat template. "none" turns thinking off instead."""
    enable_thinking: bool | None = None
    """Variables `enable_thinking` and `thinking` of the chat template."""
    thinking: bool | ThinkingSwitch | None = None
    """Alternative to `enable_thinking`, in the form of DeepSeek, GLM and Anthropic."""
    reasoning: ReasoningSwitch | None = None
    """Alternative to `reasoning_effort`, `enable_thinking` and `thinking_token_budget`, in the form
    of OpenRouter."""
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
        self.check_min_tokens(*self.most_tokens)
        for param in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, param) and not self.logprobs:
                raise InvalidRequest(f"'{param}' needs 'logprobs': true.", param=param)
        check_end(self.continue_final_message, self.add_generation_prompt)

    @property
    def most_tokens(self) -> tuple[int | None, str]:
        """Maximum tokens of the answer, or None for the default, and the field that sets it."""
        for param in ("max_completion_tokens", "max_tokens"):
            if (given := most_tokens(getattr(self, param), param)) is not None:
                return given, param
        return None, "max_tokens"

    @property
    def thought_budget(self) -> ThoughtBudget | None:
        """Maximum tokens of a thought, or None if there is no limit. Raises InvalidRequest if two
        fields set different limits."""
        switch = self.thinking if isinstance(self.thinking, ThinkingSwitch) else ThinkingSwitch()
        found = _agreed(
            ("thinking_token_budget", self.thinking_token_budget),
            ("thinking_budget", self.thinking_budget),
            ("thinking", switch.budget_tokens),
            ("reasoning", self.reasoning and self.reasoning.max_tokens),
        )
        if found is None or found[1] == -1:
            return None
        param, given = found
        return ThoughtBudget(given, param, dropped_as=BUDGETS.get(param, ""))

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Variables of the chat template. `chat_template_kwargs` overrides the other fields. Raises
        InvalidRequest if two fields contradict each other."""
        reasoning = self.reasoning or ReasoningSwitch()
        effort = _agreed(
            ("reasoning_effort", self.reasoning_effort), ("reasoning", reasoning.effort)
        )
        thinks = _agreed(
            ("enable_thinking", self.enable_thinking),
            ("thinking", _is_on(self.thinking)),
            ("reasoning", reasoning.enabled),
            ("reasoning_effort", False if effort and effort[1] == "none" else None),
        )
        return template_variables(
            thinks=thinks and thinks[1],
            effort=effort and effort[1],
            given=self.chat_template_kwargs,
        )

    @property
    def shows_thoughts(self) -> bool:
        return self.include_reasoning is not False and not (
            self.reasoning and self.reasoning.exclude
        )


def _is_on(thinking: bool | ThinkingSwitch | None) -> bool | None:
    if isinstance(thinking, ThinkingSwitch):
        return None if thinking.type is None else thinking.type != "disabled"
    return thinking


def _agreed(*given: tuple[str, T | None]) -> tuple[str, T] | None:
    """Returns the first field that is set, with its value. Returns None if none is set. Raises
    InvalidRequest if two fields have different values."""
    found: tuple[str, T] | None = None
    for param, value in given:
        if value is None:
            continue
        if found is not None and found[1] != value:
            raise InvalidRequest(
                f"'{found[0]}' and '{param}' set the same option to different values.", param=param
            )
        found = found or (param, value)
    return found


NO_THOUGHT = b'"reasoning":null,"reasoning_content":null}'
"""End of a delta without a thought. Clients read these keys of every delta."""


class ChatFormat(OpenAIFormat):
    chunk_kind = "chat.completion.chunk"
    body_kind = "chat.completion"
    constants: ClassVar[dict[str, str]] = {"service_tier": "default"}
    tells_prompt_once = True

    def __init__(self, *args: Any, shows_thoughts: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shows_thoughts = shows_thoughts
        self._begun: set[int] = set()

    def chunk(self, delta: Delta) -> bytes:
        """Returns the chunks of a delta. The first chunk of a choice has the role. The last chunk
        has the finish reason and an empty delta."""
        chunks: list[bytes] = []
        if delta.index not in self._begun:
            chunks.append(self._role(delta))
            self._begun.add(delta.index)
        if delta.parts or delta.scored or (self._token_ids and delta.tokens):
            piece = msgspec.structs.replace(delta, finish_reason=None, stop=None)
            chunks.append(self._chunk(delta.index, self._delta(delta), self._end(piece)))
        if delta.finish_reason is not None:
            last = msgspec.structs.replace(delta, scored=[], tokens=[])
            chunks.append(self._chunk(delta.index, b"{" + NO_THOUGHT, self._end(last)))
        return b"".join(chunks)

    def _role(self, delta: Delta) -> bytes:
        """Returns the first chunk of a choice. The first chunk of the stream also has the prompt's
        token ids, if token ids are requested."""
        end = self._bare_end(msgspec.structs.replace(delta, num_tokens=0, num_thought_tokens=0))
        if not self._begun:
            end = end.removesuffix(b"}\n\n") + self._told_prompt(delta) + b"}\n\n"
        return self._chunk(delta.index, b'{"role":"assistant","content":"",' + NO_THOUGHT, end)

    def _chunk(self, index: int, delta: bytes, end: bytes) -> bytes:
        return b'%s{"index":%d,"delta":%s%s' % (self._head, index, delta, end)

    def _delta(self, delta: Delta) -> bytes:
        if all(type(part) is Text for part in delta.parts):
            return b'{"content":%s,%s' % (encode(delta.text), NO_THOUGHT)
        shown: dict[str, Any] = {"reasoning": None, "reasoning_content": None}
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
                scored_token(
                    self._spelled,
                    entry,
                    as_ids=self._tokens_as_ids,
                    includes_own=self._chooses_tokens,
                )
                for entry in scored
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
        max_tokens, max_tokens_param = body.most_tokens
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
            max_tokens=max_tokens,
            max_tokens_param=max_tokens_param,
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )

    def answer_format(self, body: ChatCompletionRequest, context: AnswerContext) -> ChatFormat:
        return ChatFormat(
            f"{self.id_prefix}-{context.request_id}",
            body,
            context.spelled,
            logprobs=bool(body.logprobs),
            shows_thoughts=body.shows_thoughts,
        )
