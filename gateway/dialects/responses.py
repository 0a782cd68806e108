"""OpenAI's Responses, without a store: POST /v1/responses."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from gateway.dialects.chat_messages import read_arguments, read_tools
from gateway.dialects.constraints import JsonObjectFormat, object_constraint, schema_constraint
from gateway.dialects.dialect import Dialect
from gateway.dialects.dropped import RESPONSES, RESPONSES_TOOL_TYPES
from gateway.dialects.responses_fields import (
    AnyItem,
    CallItem,
    CallOutputItem,
    FunctionChoice,
    FunctionTool,
    MessageItem,
    Parts,
    ReasoningItem,
    ResponsesRequest,
    TextConfig,
    TextSchemaFormat,
)
from gateway.dialects.responses_format import CARRIED, ResponsesFormat
from gateway.exceptions import InvalidRequest
from gateway.generation_request import Constraint, GenerationRequest, NamedTool, ToolChoice
from gateway.messages import MadeCall, Message, in_turns
from gateway.text.detokenizer import TokenBytes

REASONING_OPTIONS = ("context", "generate_summary", "mode", "summary")


class Responses(Dialect[ResponsesRequest]):
    id_prefix = "resp"

    def read(self, body: ResponsesRequest) -> GenerationRequest:
        dropped = {name for name in RESPONSES if getattr(body, name, None) is not None}
        if body.truncation == "disabled":
            dropped.remove("truncation")
        tools = read_tools(body.tools or [], FunctionTool, RESPONSES_TOOL_TYPES, dropped)
        return GenerationRequest(
            model=body.model,
            stream=bool(body.stream),
            messages=_messages(body, dropped),
            max_tokens=body.max_output_tokens,
            num_logprobs=body.num_logprobs,
            scores_texts=body.num_logprobs is not None,
            **body.sampling(),
            tools=[tool.neutral() for tool in tools],
            tool_choice=_choice(body),
            is_parallel=body.parallel_tool_calls is not False,
            constraint=_constraint(body.text, dropped),
            template_arguments=_template_arguments(body, dropped),
            user=body.user or body.safety_identifier,
            dropped=tuple(sorted(dropped)),
        )

    def answer_format(
        self, body: ResponsesRequest, request_id: str, spelled: TokenBytes
    ) -> ResponsesFormat:
        echoed = {
            "id": f"{self.id_prefix}_{request_id}",
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool for tool in body.tools or () if tool.get("type") == "function"],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }
        return ResponsesFormat(
            request_id, echoed, spelled, carries_reasoning=body.carries_reasoning
        )


def _messages(body: ResponsesRequest, dropped: set[str]) -> list[Message]:
    messages = [Message("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, Message("user", body.input)]
    for number, item in enumerate(body.input):
        place = f"input[{number}]"
        if message := _message(_item(item, place), place, dropped):
            messages.append(message)
    return in_turns(messages, _is_same_turn)


def _item(given: dict[str, Any], place: str) -> AnyItem:
    """Raises InvalidRequest. A message may come without its type."""
    if given.get("type") == "item_reference":
        raise InvalidRequest(
            f"Unsupported item in '{place}': 'item_reference'. Responses are not stored: send the "
            "item itself, as clients do where 'store' is false.",
            param="input",
            code="unsupported_item",
        )
    if "type" not in given and "role" in given:
        given = {"type": "message", **given}
    try:
        return msgspec.convert(given, AnyItem)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"Invalid value for '{place}': {error}.", param="input") from None


def _message(item: AnyItem, place: str, dropped: set[str]) -> Message | None:
    """An item as a message. What a model reasoned, said and called in one turn are items of their
    own, to be joined. None: nothing of it is kept."""
    match item:
        case MessageItem(role=role, content=content):
            if item.phase is not None:
                dropped.add("phase")
            return Message("system" if role == "developer" else role, _text(content))
        case CallItem(call_id=id, name=name, arguments=arguments):
            call = MadeCall(id, name, read_arguments(arguments, place))
            return Message("assistant", calls=[call])
        case CallOutputItem(call_id=id, output=output):
            return Message("tool", _text(output), call_id=id)
        case ReasoningItem():
            carried = item.encrypted_content
            text = "\n".join([part.text for part in item.content or ()])
            if not text and carried is not None:
                text = reasoning_of(carried, place)
            if item.summary or (carried and not text):
                dropped.add("reasoning_items")
            return Message("assistant", reasoning=text) if text else None


def reasoning_of(carried: str, place: str) -> str:
    """The reasoning in `encrypted_content`; empty if it is a vendor's. Raises InvalidRequest."""
    if not carried.startswith(CARRIED):
        return ""
    try:
        return base64.b64decode(carried.removeprefix(CARRIED), validate=True).decode()
    except ValueError:
        raise InvalidRequest(
            f"Invalid value for '{place}': 'encrypted_content' is not as it was answered.",
            param="input",
        ) from None


def _is_same_turn(last: Message, message: Message) -> bool:
    """Whether a message goes on with the turn of the last: reasoning, text, calls."""
    if last.role != "assistant" or message.role != "assistant":
        return False
    return bool(message.calls) or not (last.content or last.calls)


def _text(content: str | Parts) -> str:
    return content if isinstance(content, str) else "\n".join([part.text for part in content])


def _choice(body: ResponsesRequest) -> ToolChoice:
    choice = body.tool_choice
    return NamedTool(choice.name) if isinstance(choice, FunctionChoice) else choice or "auto"


def _constraint(text: TextConfig | None, dropped: set[str]) -> Constraint | None:
    if text is None:
        return None
    if text.verbosity is not None:
        dropped.add("text.verbosity")
    match text.format:
        case TextSchemaFormat() as format:
            return schema_constraint("text", format.schema, strict=format.strict)
        case JsonObjectFormat() as format:
            return object_constraint("text", format)
        case _:
            return None


def _template_arguments(body: ResponsesRequest, dropped: set[str]) -> dict[str, Any]:
    reasoning = body.reasoning
    if reasoning is None:
        return {}
    if any(getattr(reasoning, option) is not None for option in REASONING_OPTIONS):
        dropped.add("reasoning.options")
    match reasoning.effort:
        case None:
            return {}
        case "none":
            return {"enable_thinking": False}
        case effort:
            return {"reasoning_effort": effort}
