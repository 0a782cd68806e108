"""Translates OpenAI's Responses, without storing any response: POST /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.dialects.chat_messages import template_variables
from gateway.dialects.dialect import AnswerContext, Dialect
from gateway.dialects.dropped import EMPTY_STOP, RESPONSES
from gateway.dialects.function_tools import allowed_tools, qualified
from gateway.dialects.generation_fields import (
    JsonObjectFormat,
    has_empty,
    object_constraint,
    schema_constraint,
)
from gateway.dialects.history import ConversationReader, Json, Place, as_list, as_object, is_absent
from gateway.dialects.response_items import ItemReading, namespaces
from gateway.dialects.responses_fields import (
    AllowedChoice,
    FunctionChoice,
    Reasoning,
    ResponsesRequest,
    TextConfig,
    TextSchemaFormat,
)
from gateway.dialects.responses_format import ResponsesFormat
from gateway.exceptions import InvalidRequest
from gateway.request import Constraint, Message, NamedTool, Request, Tool, ToolChoice
from workers.wire.protocol import SamplingParams

FUNCTION_KEYS = ("name", "description", "parameters", "strict")
REASONING_OPTIONS = ("context", "mode")


def echoed(body: ResponsesRequest, used: SamplingParams) -> dict[str, Any]:
    """Returns the fields that every response object of one answer repeats. `used` are the sampling
    parameters, including defaults of the adapter and the base model."""
    reasoning = body.reasoning or Reasoning()
    return {
        "background": False,
        "frequency_penalty": used.frequency_penalty,
        "instructions": body.instructions,
        "max_output_tokens": body.most_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": used.presence_penalty,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summarises},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": used.temperature,
        "text": {"format": _text_format(body.text)},
        "tool_choice": body.tool_choice or "auto",
        "tools": _tools(body.tools or ()),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": used.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _text_format(text: TextConfig | None) -> Any:
    match text and text.format:
        case None | JsonObjectFormat(schema=None) as format:
            return {"type": "json_object" if format else "text"}
        case format:
            return format


def _tools(given: Sequence[Json]) -> list[dict[str, Any]]:
    """Returns the supported tools: functions, and namespaces of functions."""
    shown: list[dict[str, Any]] = []
    for tool in given:
        match tool.get("type"):
            case "function":
                shown.append(_function(tool))
            case "namespace":
                nested = _tools(list(map(as_object, as_list(tool.get("tools")))))
                description = tool.get("description") or ""
                shown.append({**_of_kind(tool), "description": description, "tools": nested})
            case _:
                pass
    return shown


def _function(tool: Json) -> dict[str, Any]:
    return {**_of_kind(tool), **{key: tool.get(key) for key in FUNCTION_KEYS}}


def _of_kind(tool: Json) -> dict[str, Any]:
    return {"type": tool.get("type"), "name": tool.get("name")}


class Responses(Dialect[ResponsesRequest]):
    id_prefix = "resp"

    def read(self, body: ResponsesRequest) -> Request:
        dropped = {name for name in RESPONSES if not is_absent(getattr(body, name, None))}
        if body.truncation == "disabled":
            dropped.remove("truncation")
        if body.store is False:
            dropped.remove("store")
        if has_empty(body.stop):
            dropped.add(EMPTY_STOP)
        reader = ConversationReader()
        items = ItemReading(reader)
        messages = _messages(body, items)
        tools = items.offered(body.tools or [])
        choice = _choice(body, tools, reader)
        constraint, arguments = _constraint(body.text, dropped), _template_arguments(body, dropped)
        return Request(
            model=body.model,
            stream=bool(body.stream),
            messages=messages,
            max_tokens=body.most_tokens,
            max_tokens_param="max_output_tokens",
            num_logprobs=body.num_logprobs,
            scores_texts=body.num_logprobs is not None,
            **body.sampling(),
            tools=tools,
            tool_choice=choice,
            is_parallel=body.parallel_tool_calls is not False,
            constraint=constraint,
            template_arguments=arguments,
            user=body.user or body.safety_identifier,
            dropped=tuple(sorted(dropped | {*reader.dropped})),
        )

    def answer_format(self, body: ResponsesRequest, context: AnswerContext) -> ResponsesFormat:
        reasoning = body.reasoning or Reasoning()
        return ResponsesFormat(
            context.request_id,
            {"id": f"{self.id_prefix}_{context.request_id}", **echoed(body, context.used)},
            context.spelled,
            carries_reasoning=body.carries_reasoning,
            summarises=reasoning.summarises is not None,
            namespaces=namespaces(body.tools or [], body.input),
        )


def _messages(body: ResponsesRequest, items: ItemReading) -> list[Message]:
    messages = [Message("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, Message("user", body.input)]
    messages += items.messages(body.input)
    if not messages:
        raise InvalidRequest("'input' has no item with a text, a call or a result.", param="input")
    return messages


def _choice(
    body: ResponsesRequest, tools: Sequence[Tool], reader: ConversationReader
) -> ToolChoice:
    """Returns the choice of tools as a `Request` has it. Raises InvalidRequest if an allowed
    function or namespace has no name."""
    match body.tool_choice:
        case FunctionChoice(name=name, namespace=namespace):
            return NamedTool(_called(body, name, namespace))
        case AllowedChoice(mode=mode, tools=allowed):
            names: list[str] = []
            for number, tool in enumerate(allowed):
                kind, name, namespace = map(tool.get, ("type", "name", "namespace"))
                if kind not in ("function", "namespace"):
                    reader.drop_kind("tools", kind)
                elif not isinstance(name, str) or not isinstance(namespace, str | None):
                    place = Place("tool_choice").inner("tools").inner(number)
                    raise place.invalid("Expected a name")
                elif kind == "function":
                    names.append(_called(body, name, namespace))
                else:
                    names += [each.name for each in tools if each.name.startswith(f"{name}__")]
            return allowed_tools(mode, names)
        case choice:
            return choice or "auto"


def _called(body: ResponsesRequest, name: str, namespace: str | None) -> str:
    """Returns the name by which the model calls a function that a choice names. The choice may
    leave out the namespace if only one function has this name."""
    if namespace:
        return qualified(namespace, name)
    spaces = namespaces(body.tools or [], body.input)
    found = [called for called, (_, inner) in spaces.items() if inner == name]
    is_bare = any(tool.get("name") == name for tool in body.tools or () if "tools" not in tool)
    return found[0] if len(found) == 1 and not is_bare else name


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
    """Returns the variables of the chat template."""
    reasoning = body.reasoning or Reasoning()
    if any(getattr(reasoning, option) is not None for option in REASONING_OPTIONS):
        dropped.add("reasoning.options")
    return template_variables(effort=reasoning.effort, given=body.chat_template_kwargs)
