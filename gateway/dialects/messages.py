"""Translates Anthropic's Messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from gateway.dialects.chat_messages import read_role, template_variables
from gateway.dialects.dialect import AnswerContext, Dialect
from gateway.dialects.dropped import EMPTY_STOP, MESSAGES, UNBOUNDED_THOUGHT
from gateway.dialects.function_tools import NO_ARGUMENTS, read_definition
from gateway.dialects.generation_fields import has_empty, schema_constraint, stops_of
from gateway.dialects.history import (
    ConversationReader,
    Json,
    Place,
    Writer,
    as_list,
    as_object,
    is_absent,
    typed_index,
)
from gateway.dialects.messages_fields import (
    AnyChoice,
    Conversation,
    CustomTool,
    MessagesRequest,
    NamedChoice,
    NoChoice,
    OutputConfig,
    Thinking,
)
from gateway.dialects.messages_format import MessagesFormat
from gateway.exceptions import InvalidRequest
from gateway.request import (
    Constraint,
    Message,
    NamedTool,
    Request,
    ThoughtBudget,
    Tool,
    ToolChoice,
    in_turns,
)
from gateway.text.schema_parts import with_maps

BILLING_HEADER = re.compile(r"^x-anthropic-billing-header:.*\n*", re.MULTILINE)
Role = Literal["user", "assistant", "system"]
ROLES: Mapping[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}
FIELDS = frozenset(
    (
        *("role", "content", "id", "type", "model", "stop_reason", "stop_sequence"),
        *("stop_details", "usage"),
    )
)
"""Known fields of a message. Clients send answers back as messages, with the additional fields that
an answer has."""
CALL_FIELDS = frozenset(("type", "id", "name", "input"))
RESULT_FIELDS = frozenset(("type", "tool_use_id", "content", "is_error"))


class Messages(Dialect[MessagesRequest]):
    id_prefix = "msg"

    def read(self, body: MessagesRequest) -> Request:
        fields = MessageReading(body).neutral_fields()
        if has_empty(body.stop_sequences):
            fields["dropped"] = tuple(sorted((*fields["dropped"], EMPTY_STOP)))
        return Request(
            **fields,
            stream=bool(body.stream),
            max_tokens=body.max_tokens,
            stop=stops_of(body.stop_sequences),
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            constraint=_constraint(body.output_config),
            thought_budget=_thought_budget(body.thinking),
            user=body.metadata.user_id if body.metadata else None,
        )

    def count(self, body: Conversation) -> Request:
        """Returns the `Request` whose prompt tokens are counted. Raises InvalidRequest."""
        return Request(**MessageReading(body).neutral_fields())

    def answer_format(self, body: MessagesRequest, context: AnswerContext) -> MessagesFormat:
        id = f"{self.id_prefix}_{context.request_id}"
        return MessagesFormat(id, context.request_id, body.model, body.stop_sequences or [])


class MessageReading:
    """Reader that turns a conversation into the messages and tools of a `Request`. Collects the
    names of contents that it drops."""

    def __init__(self, body: Conversation) -> None:
        self._body = body
        self._reader = ConversationReader()

    def neutral_fields(self) -> dict[str, Any]:
        """Returns the fields of the `Request` that the conversation sets. Raises InvalidRequest."""
        body = self._body
        self._note(body, *MESSAGES)
        messages = self._system(body.system, Place("system"))
        typed, place = typed_index(body.messages, _writer), Place("messages")
        for number, message in enumerate(body.messages):
            messages += self._turns(message, Place(number, place, number == typed))
        messages = merged(messages)
        if not messages:
            raise InvalidRequest("'messages' has no text to answer.", param="messages")
        is_begun = body.messages[-1].get("role") == "assistant" and not messages[-1].calls
        is_begun = is_begun and messages[-1].role == "assistant"
        return {
            "model": body.model,
            "messages": messages,
            "add_generation_prompt": not is_begun,
            "continue_final_message": is_begun,
            "tools": self._tools(body.tools or []),
            "tool_choice": self._choice(),
            "is_parallel": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
            "template_arguments": self._template_arguments(),
            "dropped": self._reader.dropped,
        }

    def _system(self, system: Any, place: Place) -> list[Message]:
        parts = self._reader.parts(system, place)
        texts = [self._reader.part(part, place, number) for number, part in enumerate(parts)]
        texts = list(map(self._system_text, texts))
        content = "\n".join([text for text in texts if text])
        return [Message("system", content)] if content else []

    def _system_text(self, text: str) -> str:
        kept, num_cut = BILLING_HEADER.subn("", text)
        if num_cut:
            self._reader.drop("billing_header")
        return kept

    def _turns(self, message: Json, place: Place) -> list[Message]:
        """Converts a message of the body. Each tool result in it becomes a separate message."""
        role = read_role(message, place, ROLES)
        content = self._reader.fields(message, FIELDS, place).get("content")
        if place.is_typed and message.get("content") is None:
            raise place.refusal(f"'{place.path}' needs 'content'.")
        place = place.inner("content")
        if role == "system":
            return self._system(content, place)
        if isinstance(content, str):
            return [Message(role, content)]
        turns: list[Message] = []
        for number, block in enumerate(self._reader.parts(content, place)):
            turns += self._block(role, block, place, number)
        return merged(turns) or [Message(role)]

    def _block(self, role: Role, block: Any, content: Place, number: int) -> Sequence[Message]:
        """Converts a content block to messages, or to none if the block is dropped."""
        given = as_object(block)
        if "tool_use_id" in given:
            return [self._result(given, content.inner(number))]
        if role == "assistant":
            if given.get("type") == "redacted_thinking":
                self._reader.drop("redacted_thinking")
                return ()
            if _is_call(given):
                place = content.inner(number)
                fields = self._reader.fields(given, CALL_FIELDS, place)
                id, name, input = (fields.get(field) for field in ("id", "name", "input"))
                return [Message("assistant", calls=self._reader.call(id, name, input, place))]
            if (thought := self._reader.thought(block, content)) is not None:
                return [Message("assistant", reasoning=thought)]
        return [Message(role, self._reader.part(block, content, number))]

    def _result(self, block: Json, place: Place) -> Message:
        fields = self._reader.fields(block, RESULT_FIELDS, place)
        if fields.get("is_error"):
            self._reader.drop("is_error")
        id, content = fields.get("tool_use_id"), fields.get("content")
        return self._reader.result(id, content, place.inner("content"))

    def _tools(self, given: Sequence[Json]) -> list[Tool]:
        tools: list[Tool] = []
        for number, tool in enumerate(given):
            if tool.get("type") not in (None, "custom"):
                self._reader.drop_kind("tools", tool["type"])
                continue
            definition = read_definition(
                tool, CustomTool, self._reader, Place(number, Place("tools"), is_typed=True)
            )
            tools.append(
                Tool(
                    name=definition.name,
                    description=definition.description or "",
                    parameters=with_maps(definition.input_schema or NO_ARGUMENTS),
                    strict=bool(definition.strict),
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
        thinking, config = self._body.thinking, self._body.output_config
        if thinking is not None and thinking.display is not None:
            self._reader.drop("thinking.display")
        return template_variables(
            thinks=None if thinking is None else thinking.type != "disabled",
            effort=config and config.effort,
        )

    def _note(self, given: Any, *names: str) -> None:
        """Records the names of dropped fields that are present."""
        for name in names:
            if not is_absent(getattr(given, name, None)):
                self._reader.drop(name)


def _writer(message: Json) -> Writer:
    for block in map(as_object, as_list(message.get("content"))):
        if "tool_use_id" in block or _is_call(block):
            return "tool"
    return "person" if message.get("role") == "user" else "other"


def _is_call(block: Json) -> bool:
    """Returns whether a block is a call. Every kind of call has a name and an id."""
    return "name" in block and "id" in block


def _thought_budget(thinking: Thinking | None) -> ThoughtBudget | None:
    """Returns the maximum length of the thought, or None. The budget is dropped if the model's
    thoughts cannot be limited, because agents send a budget to every model."""
    if thinking is None or thinking.budget_tokens is None:
        return None
    return ThoughtBudget(thinking.budget_tokens, "thinking", dropped_as=UNBOUNDED_THOUGHT)


def _constraint(config: OutputConfig | None) -> Constraint | None:
    if config is None or config.format is None:
        return None
    return schema_constraint("output_config", config.format.schema)


def merged(messages: Iterable[Message]) -> list[Message]:
    """Joins consecutive messages of one role, as Anthropic does. Each tool result stays a
    separate message."""
    return in_turns(messages, lambda last, message: last.role == message.role != "tool")
