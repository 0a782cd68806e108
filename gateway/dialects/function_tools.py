"""Reads the functions that a request offers as tools, and drops options that have no effect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec

from gateway.dialects.history import ConversationReader, Json, Place
from gateway.request import AllowedTools, Tool, ToolChoice
from gateway.text.schema_parts import with_maps

T = TypeVar("T", bound=msgspec.Struct)

AllowedMode = Literal["auto", "required"]

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
OPTIONS = frozenset(
    (
        *("allowed_callers", "defer_loading", "eager_input_streaming", "input_examples"),
        *("output_schema", "toolset_name"),
    )
)
"""Fields of a tool that are dropped, and reported as `tools.options`."""


class FunctionDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Function in the form of OpenAI's dialects."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def neutral(self, namespace: str = "") -> Tool:
        return Tool(
            name=qualified(namespace, self.name),
            description=self.description or "",
            parameters=with_maps(self.parameters or NO_ARGUMENTS),
            strict=bool(self.strict),
        )


def qualified(namespace: str, name: str) -> str:
    """Returns the name by which a model calls a function of a namespace."""
    return f"{namespace}__{name}" if namespace else name


def allowed_tools(mode: AllowedMode, names: Iterable[str]) -> ToolChoice:
    """Returns a choice that allows only these functions. Returns "none" if there are no functions
    and `mode` does not require a call."""
    allowed = AllowedTools(tuple(names), must_call=mode == "required")
    return allowed if allowed.names or allowed.must_call else "none"


def read_definition(
    given: Json, definition: type[T], reader: ConversationReader, place: Place
) -> T:
    """Reads the definition of a function into the struct `definition`. Raises InvalidRequest if a
    field is invalid or unsupported."""
    known = frozenset(definition.__struct_fields__)
    typed = msgspec.structs.replace(place, is_typed=True)
    fields = reader.fields(given, known | OPTIONS, typed)
    options = fields.keys() & OPTIONS
    if options:
        reader.drop("tools.options")
    try:
        return msgspec.convert({name: fields[name] for name in fields.keys() - options}, definition)
    except msgspec.ValidationError as error:
        raise place.invalid(str(error)) from None
