"""Anthropic's Messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.dialects.chat_messages import read_tools
from gateway.dialects.constraints import schema_constraint
from gateway.dialects.dialect import Dialect
from gateway.dialects.dropped import MESSAGES, MESSAGES_TOOL_TYPES
from gateway.dialects.messages_fields import (
    AnyBlock,
    AnyChoice,
    Conversation,
    CustomTool,
    InputMessage,
    MessagesRequest,
    NamedChoice,
    NoChoice,
    OutputConfig,
    RedactedThinkingBlock,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UnsupportedBlock,
)
from gateway.dialects.messages_format import MessagesFormat
from gateway.exceptions import InvalidRequest
from gateway.generation_request import (
    Constraint,
    GenerationRequest,
    NamedTool,
    ThoughtBudget,
    Tool,
    ToolChoice,
)
from gateway.messages import MadeCall, Message, in_turns
from gateway.text.detokenizer import TokenBytes

BILLING_HEADER = re.compile(r"^x-anthropic-billing-header:.*\n*", re.MULTILINE)
DROPPED_OPTIONS = ("allowed_callers", "defer_loading", "eager_input_streaming", "input_examples")
"""Options of a tool that are dropped."""


class Messages(Dialect[MessagesRequest]):
    id_prefix = "msg"

    def read(self, body: MessagesRequest) -> GenerationRequest:
        return GenerationRequest(
            **ConversationReading(body).neutral_fields(),
            stream=bool(body.stream),
            max_tokens=body.max_tokens,
            stop=body.stop_sequences or [],
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            constraint=_constraint(body.output_config),
            thought_budget=_thought_budget(body.thinking),
            user=body.metadata.user_id if body.metadata else None,
        )

    def count(self, body: Conversation) -> GenerationRequest:
        """The neutral request whose prompt is to be counted. Raises InvalidRequest."""
        return GenerationRequest(**ConversationReading(body).neutral_fields())

    def answer_format(
        self, body: MessagesRequest, request_id: str, spelled: TokenBytes
    ) -> MessagesFormat:
        id = f"{self.id_prefix}_{request_id}"
        return MessagesFormat(id, request_id, body.model, body.stop_sequences or [])


class ConversationReading:
    """Turns a conversation into neutral messages and tools, and notes what is dropped."""

    def __init__(self, body: Conversation) -> None:
        self._body = body
        self._dropped: set[str] = set()

    def neutral_fields(self) -> dict[str, Any]:
        """Fields of the neutral request. Raises InvalidRequest."""
        body = self._body
        self._note(body, *MESSAGES)
        messages = self._system(body.system)
        for number, message in enumerate(body.messages):
            messages += self._turns(message, f"messages[{number}]")
        is_begun = body.messages[-1].role == "assistant"
        return {
            "model": body.model,
            "messages": merged(messages),
            "add_generation_prompt": not is_begun,
            "continue_final_message": is_begun,
            "tools": self._tools(body.tools or []),
            "tool_choice": self._choice(),
            "is_parallel": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
            "template_arguments": self._template_arguments(),
            "dropped": tuple(sorted(self._dropped)),
        }

    def _system(self, system: str | Sequence[TextBlock] | None) -> list[Message]:
        blocks = [TextBlock(text=system)] if isinstance(system, str) else system or []
        texts = [self._system_text(block) for block in blocks]
        content = "\n".join([text for text in texts if text])
        return [Message("system", content)] if content else []

    def _system_text(self, block: TextBlock) -> str:
        self._note(block, "cache_control", "citations")
        kept, num_cut = BILLING_HEADER.subn("", block.text)
        if num_cut:
            self._dropped.add("billing_header")
        return kept

    def _turns(self, message: InputMessage, place: str) -> list[Message]:
        """A message as neutral ones: the results in a user's message are turns of their own."""
        content = message.content
        if message.role == "system":
            return self._system(self._only_texts(content, place))
        if isinstance(content, str):
            return [Message(message.role, content)]
        if message.role == "assistant":
            return [self._assistant_turn(content, place)]
        turns: list[Message] = []
        for number, block in enumerate(content):
            match block:
                case TextBlock():
                    self._note(block, "cache_control", "citations")
                    turns.append(Message("user", block.text))
                case ToolResultBlock():
                    turns.append(self._result(block, f"{place}.content[{number}]"))
                case _:
                    raise _misplaced(block, f"{place}.content[{number}]", message.role)
        return merged(turns) or [Message("user")]

    def _assistant_turn(self, blocks: Sequence[AnyBlock], place: str) -> Message:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[MadeCall] = []
        for number, block in enumerate(blocks):
            match block:
                case TextBlock(text=text):
                    self._note(block, "cache_control", "citations")
                    texts.append(text)
                case ToolUseBlock():
                    self._note(block, "cache_control")
                    calls.append(MadeCall(block.id, block.name, block.input))
                case ThinkingBlock(thinking=text):
                    thoughts.append(text)
                case RedactedThinkingBlock():
                    self._dropped.add("redacted_thinking")
                case _:
                    raise _misplaced(block, f"{place}.content[{number}]", "assistant")
        return Message("assistant", "\n".join(texts), reasoning="\n".join(thoughts), calls=calls)

    def _result(self, block: ToolResultBlock, place: str) -> Message:
        self._note(block, "cache_control")
        if block.is_error:
            self._dropped.add("is_error")
        texts = self._only_texts(block.content or [], place)
        content = "\n".join([text.text for text in texts])
        return Message("tool", content, call_id=block.tool_use_id)

    def _only_texts(self, content: str | Sequence[AnyBlock], place: str) -> list[TextBlock]:
        if isinstance(content, str):
            return [TextBlock(text=content)]
        texts: list[TextBlock] = []
        for number, block in enumerate(content):
            if not isinstance(block, TextBlock):
                raise _misplaced(block, f"{place}.content[{number}]", "system or tool_result")
            self._note(block, "cache_control", "citations")
            texts.append(block)
        return texts

    def _tools(self, given: Sequence[dict[str, Any]]) -> list[Tool]:
        tools: list[Tool] = []
        for tool in read_tools(given, CustomTool, MESSAGES_TOOL_TYPES, self._dropped):
            self._note(tool, "cache_control")
            if any(getattr(tool, option) is not None for option in DROPPED_OPTIONS):
                self._dropped.add("tools.options")
            tools.append(
                Tool(
                    name=tool.name,
                    description=tool.description or "",
                    parameters=tool.input_schema,
                    strict=bool(tool.strict),
                )
            )
        return tools

    def _choice(self) -> ToolChoice:
        match self._body.tool_choice:
            case NamedChoice(name=name):
                return NamedTool(name)
            case AnyChoice():
                return "required"
            case NoChoice():
                return "none"
            case _:
                return "auto"

    def _template_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        thinking, config = self._body.thinking, self._body.output_config
        if thinking is not None:
            arguments["enable_thinking"] = thinking.type != "disabled"
            if thinking.display is not None:
                self._dropped.add("thinking.display")
        if config is not None and config.effort is not None:
            arguments["reasoning_effort"] = config.effort
        return arguments

    def _note(self, given: Any, *names: str) -> None:
        """Names of fields that are dropped if they were given."""
        self._dropped.update([name for name in names if getattr(given, name, None) is not None])


def _thought_budget(thinking: Thinking | None) -> ThoughtBudget | None:
    """A wish: agents send one whatever the model is."""
    if thinking is None or thinking.budget_tokens is None:
        return None
    return ThoughtBudget(thinking.budget_tokens, "thinking", is_wish=True)


def _constraint(config: OutputConfig | None) -> Constraint | None:
    if config is None or config.format is None:
        return None
    return schema_constraint("output_config", config.format.schema)


def _misplaced(block: AnyBlock, place: str, role: str) -> InvalidRequest:
    kind = type(block).__struct_config__.tag
    reason = (
        "only text is read" if isinstance(block, UnsupportedBlock) else f"not in a {role} message"
    )
    return InvalidRequest(
        f"Unsupported block in '{place}': '{kind}', {reason}.",
        param="messages",
        code="unsupported_block",
    )


def merged(messages: Iterable[Message]) -> list[Message]:
    """Messages of one role that follow each other as one, as Anthropic reads them; each result of a
    tool stays its own."""
    return in_turns(messages, lambda last, message: last.role == message.role != "tool")
