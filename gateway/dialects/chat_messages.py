"""Defines and reads the messages and tools of OpenAI's chat completions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.dialects.function_tools import (
    AllowedMode,
    FunctionDefinition,
    allowed_tools,
    read_definition,
)
from gateway.dialects.history import (
    MAX_CALLS,
    ConversationReader,
    Json,
    Place,
    Writer,
    as_list,
    as_object,
    typed_index,
)
from gateway.exceptions import InvalidRequest
from gateway.request import MadeCall, Message, NamedTool, Tool, ToolChoice

MAX_MESSAGES = 4096
MAX_TOOLS = 512
"""Maximum number of tools in a request, including dropped tools."""
ROLES: Mapping[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
OTHER_ROLE = re.compile(r"[a-z_]{1,32}")
"""Form of a role that is not one of `ROLES`, such as `document`."""
FIELDS = frozenset(
    (
        *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"),
        *("reasoning", "refusal", "function_call", "parsed"),
    )
)
"""Known fields of a message. The official client adds `parsed`."""
CALL_FIELDS = frozenset(("id", "type", "function", "custom"))
CALLED_FIELDS = frozenset(("name", "arguments", "input", "parsed_arguments"))
"""Fields of the function or custom tool in a call."""
OF_ASSISTANTS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal")

Messages = Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


def check_end(continue_final_message: bool | None, add_generation_prompt: bool | None) -> None:
    """Raises InvalidRequest if a prompt should both continue the last message and begin an
    answer."""
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.",
            param="continue_final_message",
        )


SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn thinking on or off."""


def template_variables(
    *, thinks: bool | None = None, effort: str | None = None, given: Json | None = None
) -> Json:
    """Returns the variables of a chat template. `given` are the variables that the request sets
    itself, which override the others. `thinks` turns thinking on or off, and so does `effort` of
    "none"."""
    given = given or {}
    if effort == "none":
        thinks, effort = False, None
    found: Json = {} if effort is None else {"reasoning_effort": effort}
    if thinks is not None and given.keys().isdisjoint(SWITCHES):
        found |= dict.fromkeys(SWITCHES, thinks)
    return found | given


def neutral_messages(messages: Sequence[Json], reader: ConversationReader) -> list[Message]:
    """Converts the messages of a body. Raises InvalidRequest if a message is invalid."""
    typed, place = typed_index(messages, _writer), Place("messages")
    return [
        _neutral(message, reader, Place(number, place, number == typed))
        for number, message in enumerate(messages)
    ]


def _writer(message: Json) -> Writer:
    match message.get("role"):
        case "tool" | "function":
            return "tool"
        case "user":
            return "person"
        case _:
            return "tool" if message.get("tool_calls") or message.get("function_call") else "other"


def read_role(message: Json, place: Place, roles: Mapping[str, Any]) -> Any:
    """Returns the neutral role to which `roles` maps the message's role. Raises InvalidRequest if
    `roles` lacks the message's role."""
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        shown = f"{role[:64]!r}" if isinstance(role, str) else "none"
        raise place.inner("role").invalid(f"Expected one of {', '.join(roles)}; got {shown}")
    return roles[role]


def _neutral(message: Json, reader: ConversationReader, place: Place) -> Message:
    role = message.get("role")
    # The chat template decides about other roles: it refuses those that it does not name.
    if not (isinstance(role, str) and OTHER_ROLE.fullmatch(role) and role not in ROLES):
        role = read_role(message, place, ROLES)
    content = message.get("content")
    if isinstance(content, str) and len(message) == 2 and role != "tool":
        return Message(role, content)
    fields = reader.fields(message, FIELDS, place)
    _check_owners(fields, role, reader, place)
    if place.is_typed and message.get("content") is None:
        raise place.refusal(f"'{place.path}' needs 'content'.")
    name = fields.get("name")
    name = name if isinstance(name, str) else None
    content = fields.get("content", fields.get("refusal"))
    if role == "tool":
        id = fields.get("tool_call_id", name)
        result = reader.result(id, content, place.inner("content"))
        return msgspec.structs.replace(result, name=name)
    if role != "assistant":
        return Message(role, reader.text(content, place.inner("content")), name)
    text, thought = reader.spoken(content, place.inner("content"))
    reasoning = fields.get("reasoning_content") or fields.get("reasoning")
    if not isinstance(reasoning, str):
        reasoning = thought
    return Message("assistant", text, name, reasoning, _calls(fields, reader, place))


def _check_owners(fields: Json, role: str, reader: ConversationReader, place: Place) -> None:
    """Drops fields that messages of this role do not have. Raises InvalidRequest instead if a
    person has just typed the message."""
    for name, owner in (*((name, "assistant") for name in OF_ASSISTANTS), ("tool_call_id", "tool")):
        if name in fields and role != owner:
            if place.is_typed:
                raise place.refusal(
                    f"'{place.path}': only messages of role '{owner}' have '{name}'."
                )
            del fields[name]
            reader.drop(name)


def _calls(fields: Json, reader: ConversationReader, place: Place) -> list[MadeCall]:
    given: Any = fields.get("tool_calls", [])
    calls = as_list(given) if isinstance(given, list) else [given]
    if len(calls) > MAX_CALLS:
        raise place.inner("tool_calls").invalid(
            f"Expected at most {MAX_CALLS} calls, got {len(calls)}"
        )
    if "function_call" in fields:
        # A result of role `function` has the function's name but no call id, so the name serves as
        # the id.
        function = as_object(fields["function_call"])
        calls = [*calls, {"function": function, "id": function.get("name")}]
    return [
        found
        for number, call in enumerate(calls)
        for found in _call(call, reader, place.inner("tool_calls").inner(number))
    ]


def _call(call: Any, reader: ConversationReader, place: Place) -> list[MadeCall]:
    fields = reader.fields(as_object(call), CALL_FIELDS, place)
    given = as_object(fields.get("function") or fields.get("custom"))
    body = reader.fields(given, CALLED_FIELDS, place)
    arguments = {"input": body["input"]} if "input" in body else body.get("arguments")
    return reader.call(fields.get("id"), body.get("name"), arguments, place)


def read_tools(given: Sequence[Json] | None, reader: ConversationReader) -> list[Tool]:
    """Returns a request's functions, and drops other tools. Raises InvalidRequest if a function
    is invalid."""
    tools: list[Tool] = []
    for number, tool in enumerate(given or ()):
        place = Place(number, Place("tools"), is_typed=True)
        if tool.get("type") != "function":
            reader.drop_kind("tools", tool.get("type"))
            continue
        function = reader.fields(tool, frozenset(("type", "function")), place).get("function")
        if not isinstance(function, dict):
            raise place.inner("function").invalid("Expected an object")
        definition = read_definition(
            as_object(function), FunctionDefinition, reader, place.inner("function")
        )
        tools.append(definition.neutral())
    return tools


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    function: FunctionName


class AllowedSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Subset of the request's tools, by name."""

    mode: AllowedMode
    tools: Tools


class AllowedToolChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"
):
    """Choice among only some of the request's tools."""

    allowed_tools: AllowedSet


ChatToolChoice = Literal["auto", "none", "required"] | NamedToolChoice | AllowedToolChoice


def neutral_choice(choice: ChatToolChoice | None, reader: ConversationReader) -> ToolChoice:
    """Returns the choice of tools in the neutral form. Raises InvalidRequest if an allowed function
    has no name."""
    match choice:
        case NamedToolChoice():
            return NamedTool(choice.function.name)
        case AllowedToolChoice(allowed_tools=allowed):
            names: list[str] = []
            for number, tool in enumerate(allowed.tools):
                if tool.get("type") != "function":
                    reader.drop_kind("tools", tool.get("type"))
                    continue
                name = as_object(tool.get("function")).get("name")
                if not isinstance(name, str):
                    place = Place("tool_choice").inner("allowed_tools").inner("tools")
                    raise place.inner(number).invalid("Expected a function with a name")
                names.append(name)
            return allowed_tools(allowed.mode, names)
        case _:
            return choice or "auto"
