"""Converts the items and tools of OpenAI's Responses to the messages and tools of a `Request`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gateway.dialects.chat_messages import read_role
from gateway.dialects.function_tools import FunctionDefinition, qualified, read_definition
from gateway.dialects.history import (
    ConversationReader,
    Json,
    Place,
    Writer,
    as_list,
    as_object,
    typed_index,
)
from gateway.dialects.responses_format import CARRIED
from gateway.exceptions import InvalidRequest
from gateway.limits.bounds import TOOL_NAME
from gateway.request import Message, Tool, in_turns

ROLES: Mapping[str, Literal["system", "user", "assistant"]] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}
ANSWERED = ("type", "id", "status")
"""Fields of items that are not rendered into prompts."""
MESSAGE_FIELDS = frozenset((*ANSWERED, "role", "content"))
CALL_FIELDS = frozenset(
    (*ANSWERED, "call_id", "name", "namespace", "arguments", "parsed_arguments")
)
RESULT_FIELDS = frozenset((*ANSWERED, "call_id", "output"))
REASONING_FIELDS = frozenset((*ANSWERED, "content", "encrypted_content", "summary"))
ARGUMENTS = ("arguments", "action", "operation")
"""Fields that hold the arguments of a call, in items that are not function calls."""
OTHER_FIELDS = frozenset(
    (*CALL_FIELDS, *RESULT_FIELDS, *ARGUMENTS, "input", "error", "execution", "result", "tools")
)
OFFERS = ("additional_tools", "tool_search_output")
"""Kinds of items that offer tools to later turns."""


class ItemReading:
    """Reader that converts items to messages. Collects the tools that items list."""

    def __init__(self, reader: ConversationReader) -> None:
        self._reader = reader
        self.tools: list[Json] = []

    def messages(self, items: Sequence[Json]) -> list[Message]:
        """Returns the items as messages. Joins the reasoning, text and calls of one turn. Raises
        InvalidRequest if an item cannot be read."""
        typed, place = typed_index(items, _writer), Place("input")
        messages = [
            message
            for number, item in enumerate(items)
            for message in self._item(item, Place(number, place, number == typed))
        ]
        return in_turns(messages, _is_same_turn)

    def _item(self, item: Json, place: Place) -> list[Message]:
        match _kind(item):
            case "message":
                return [self._message(item, place)]
            case "reasoning":
                return self._reasoning(item, place)
            case "function_call":
                fields = self._reader.fields(item, CALL_FIELDS, place)
                return self._call(fields, fields.get("arguments"), place)
            case "function_call_output":
                fields = self._reader.fields(item, RESULT_FIELDS, place)
                return [self._reader.result(fields.get("call_id"), fields.get("output"), place)]
            case "item_reference":
                raise place.refusal(
                    f"Unsupported item in '{place.path}': 'item_reference'. Responses are not "
                    "stored: send the item itself, as clients do where 'store' is false.",
                    code="unsupported_item",
                )
            case kind:
                return self._other(item, kind, place)

    def _message(self, item: Json, place: Place) -> Message:
        role = read_role(item, place, ROLES)
        content = self._reader.fields(item, MESSAGE_FIELDS, place).get("content")
        if place.is_typed and item.get("content") is None:
            raise place.refusal(f"'{place.path}' needs 'content'.")
        place = place.inner("content")
        if role != "assistant":
            return Message(role, self._reader.text(content, place))
        text, reasoning = self._reader.spoken(content, place)
        return Message("assistant", text, reasoning=reasoning)

    def _reasoning(self, item: Json, place: Place) -> list[Message]:
        fields = self._reader.fields(item, REASONING_FIELDS, place)
        carried = fields.get("encrypted_content")
        text = self._reader.text(fields.get("content"), place.inner("content"))
        if not text and isinstance(carried, str):
            text = reasoning_of(carried)
        summary = self._reader.text(fields.get("summary"), place.inner("summary"))
        text = text or summary
        if summary not in ("", text) or (carried and not text):
            self._reader.drop("reasoning_items")
        return [Message("assistant", reasoning=text)] if text else []

    def _call(self, fields: Json, arguments: Any, place: Place) -> list[Message]:
        name, namespace = fields.get("name"), fields.get("namespace")
        if isinstance(name, str) and isinstance(namespace, str):
            name = qualified(namespace, name)
        calls = self._reader.call(fields.get("call_id"), name, arguments, place)
        return [Message("assistant", calls=calls)] if calls else []

    def _other(self, item: Json, kind: str, place: Place) -> list[Message]:
        """Returns an item of another kind as messages: a text, a call, a result, a call with its
        result, or nothing."""
        id = item.get("call_id")
        if kind in OFFERS:
            self.tools += map(as_object, as_list(item.get("tools")))
            if id is None:
                return []
        if isinstance(item.get("role"), str) and item["role"] in ROLES and "content" in item:
            return [self._message(item, place)]
        if kind.endswith("_output"):
            self._reader.fields(item, OTHER_FIELDS, place)
            output = item.get("output") or item.get("result") or item.get("status")
            if kind in OFFERS:
                output = ", ".join(names_of(item.get("tools")))
            # The output of a local shell has the call's id in `id`.
            return [self._reader.result(id or item.get("id"), output, place)]
        found = [item[name] for name in ARGUMENTS if name in item]
        if isinstance(text := item.get("input"), str):
            found = [{"input": text}]
        outcome = item.get("output") or item.get("error")
        if not found or (id is None and not outcome):
            self._reader.drop_kind("items", kind)
            return []
        fields = {"name": kind.removesuffix("_call")}
        fields |= self._reader.fields(item, OTHER_FIELDS, place) | {"call_id": id or item.get("id")}
        messages = self._call(fields, found[0], place)
        if outcome:
            messages.append(self._reader.result(fields["call_id"], outcome, place))
        return messages

    def offered(self, given: Sequence[Json]) -> list[Tool]:
        """Returns the functions that the model may call: those of the field `tools`, and those of
        tools that an item of the input lists. Raises InvalidRequest if an entry of `tools` cannot
        be read."""
        tools = [
            tool
            for number, each in enumerate(given)
            for tool in self._functions(each, "", Place(number, Place("tools"), is_typed=True))
        ]
        names = {tool.name for tool in tools}
        for each in self.tools:
            for tool in self._offered_later(each):
                if tool.name not in names:
                    names.add(tool.name)
                    tools.append(tool)
        return tools

    def _offered_later(self, tool: Json) -> list[Tool]:
        """Returns the functions of a tool in an item, except functions with an invalid name.
        Returns an empty list if the tool cannot be read."""
        try:
            tools = self._functions(tool, "", Place("input"))
        except InvalidRequest:
            tools = []
        found = [tool for tool in tools if TOOL_NAME.fullmatch(tool.name)]
        if len(found) < max(len(tools), 1):
            self._reader.drop_kind("tools", tool.get("type"))
        return found

    def _functions(self, tool: Json, namespace: str, place: Place) -> list[Tool]:
        kind = tool.get("type")
        if kind == "function":
            bare = {name: value for name, value in tool.items() if name != "type"}
            definition = read_definition(bare, FunctionDefinition, self._reader, place)
            return [definition.neutral(namespace)]
        name, nested = tool.get("name"), tool.get("tools")
        if kind == "namespace" and isinstance(name, str) and not namespace:
            if tool.get("description"):
                self._reader.drop("tools.options")
            return [
                found
                for number, each in enumerate(map(as_object, as_list(nested)))
                for found in self._functions(each, name, place.inner("tools").inner(number))
            ]
        self._reader.drop_kind("tools", kind)
        return []


def namespaces(tools: Sequence[Json], items: Any) -> dict[str, tuple[str, str]]:
    """Maps the name by which a model calls a function to its namespace and its name there. Contains
    only functions that are in a namespace."""
    found: dict[str, tuple[str, str]] = {}
    offered = [
        as_object(tool)
        for item in map(as_object, as_list(items))
        if item.get("type") in OFFERS
        for tool in as_list(item.get("tools"))
    ]
    for tool in (*tools, *offered):
        space = tool.get("name")
        if tool.get("type") == "namespace" and isinstance(space, str):
            found |= {qualified(space, name): (space, name) for name in names_of(tool.get("tools"))}
    return found


def names_of(tools: Any) -> list[str]:
    """Returns the names of the tools that have a name."""
    names = [as_object(tool).get("name") for tool in as_list(tools)]
    return [name for name in names if isinstance(name, str)]


def reasoning_of(carried: str) -> str:
    """Returns the reasoning in `encrypted_content`, or "" if another server wrote the field."""
    if not carried.startswith(CARRIED):
        return ""
    try:
        return base64.b64decode(carried.removeprefix(CARRIED), validate=True).decode()
    except ValueError:
        return ""


def _kind(item: Json) -> str:
    """Returns the kind of an item. An item with a role but no type is a message."""
    kind = item.get("type")
    if kind is None and "role" in item:
        return "message"
    return kind if isinstance(kind, str) else "unnamed"


def _writer(item: Json) -> Writer:
    match _kind(item):
        case "message":
            return "person" if item.get("role") == "user" else "other"
        case "reasoning" | "additional_tools":
            return "other"
        case _:
            return "tool"


def _is_same_turn(last: Message, message: Message) -> bool:
    """Returns whether `message` continues the turn of `last`. A turn of an assistant has reasoning,
    then text, then calls."""
    if last.role != "assistant" or message.role != "assistant":
        return False
    return bool(message.calls) or not (last.content or last.calls)
