"""Reads the parts of a conversation, for chats, Messages and Responses alike.

All of a conversation is history, except for the message that a person has just typed. Unreadable
history is replaced by a short text or omitted, and named in the answer's header `loraplex-dropped`.
It is not refused, because then every later turn would be refused too: a client cannot correct
history that a model, a tool, another server or an earlier version of the client wrote. A message
just typed is refused if a part of it cannot be read. Size limits apply to both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal, TypeVar, cast

import msgspec

from gateway.dialects.dropped import LONE_SURROGATES, WITHOUT_EFFECT
from gateway.exceptions import InvalidRequest
from gateway.limits.bounds import MAX_DEPTH, check_json
from gateway.request import MadeCall, Message
from web.lone_surrogates import replace_lone_surrogates

T = TypeVar("T")
Json = dict[str, Any]

DIRECT = {"type": "direct"}
"""Value of `caller` in calls that the model itself made, as all are here."""
MAX_PARTS = 4096
"""Maximum content parts of one message or item."""
MAX_CALLS = 256
"""Maximum tool calls of one message."""
MAX_ID_CHARS = 256
MAX_NAME_CHARS = 128
MAX_NESTED_CONTENTS = 2
"""Maximum depth of nested contents in a part."""
NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,64}")
"""Pattern of names in a request that an answer's header may repeat."""
TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
    "tool_reference": "tool_name",
}
"""Kinds of text parts, each with the field that has the text."""
DOCUMENTS = ("document", "search_result")
"""Kinds of parts that may contain text."""
HEADINGS = ("title", "source", "context")
"""Fields of such parts whose texts are written before the part's text."""
DOCUMENT_FIELDS = frozenset(("type", "text", "content", "data", "media_type", *HEADINGS))
THOUGHTS = {"thinking": "thinking", "reasoning": "text", "reasoning_text": "text"}
"""Kinds of an assistant's reasoning parts, each with the field that has the text."""
PART_FIELDS = frozenset(
    (
        *("type", "annotations", "logprobs", "parsed", "parsed_output", "signature"),
        *TEXTS.values(),
        *THOUGHTS.values(),
    )
)
"""Known fields of parts with text or reasoning. Some of these fields occur in answers, and add
nothing to the text."""

Writer = Literal["person", "tool", "other"]


def typed_index(given: Sequence[T], writer: Callable[[T], Writer]) -> int | None:
    """Returns the index of the user's last message if a person has just typed it. Returns None if a
    tool call or result follows the message, because a model has then answered it already. Also
    returns None if one directly precedes the message, because the client has then written it."""
    for number in reversed(range(len(given))):
        match writer(given[number]):
            case "tool":
                return None
            case "person":
                is_result = number > 0 and writer(given[number - 1]) == "tool"
                return None if is_result else number
            case "other":
                pass
    return None


class Place(msgspec.Struct, frozen=True, gc=False):
    """Position of an object in the body. The path is computed only when a refusal needs it."""

    name: str | int
    """Name of the field, or index in the list."""
    within: Place | None = None
    is_typed: bool = False
    """Whether a person has just typed the object. Otherwise it is history."""

    def inner(self, name: str | int) -> Place:
        return Place(name, self, self.is_typed)

    @property
    def path(self) -> str:
        if self.within is None:
            return str(self.name)
        name = f"[{self.name}]" if isinstance(self.name, int) else f".{self.name}"
        return self.within.path + name

    def refusal(self, message: str, *, code: str | None = None) -> InvalidRequest:
        """Returns an error that names the top-level field of the body in which this place is."""
        return InvalidRequest(message, param=re.split(r"[.\[]", self.path)[0], code=code)

    def invalid(self, reason: str) -> InvalidRequest:
        return self.refusal(f"Invalid value for '{self.path}': {reason}.")


class ConversationReader:
    """Reader of the objects of one conversation. Collects the names of dropped contents."""

    def __init__(self) -> None:
        self._dropped: set[str] = set()

    @property
    def dropped(self) -> tuple[str, ...]:
        return tuple(sorted(self._dropped))

    def drop(self, name: str) -> None:
        self._dropped.add(name)

    def drop_kind(self, of: str, kind: object) -> None:
        """Records a dropped object by its kind, as `<of>.<kind>`. The kind comes from the request,
        so it is replaced by `unnamed` unless it matches NAME."""
        is_name = isinstance(kind, str) and NAME.fullmatch(kind)
        self._dropped.add(f"{of}.{kind if is_name else 'unnamed'}")

    def fields(self, given: Json, known: AbstractSet[str], place: Place) -> Json:
        """Returns the known fields of an object. null, [] and {} count as absent. Raises
        InvalidRequest if a person has just typed the object and it has an unknown field."""
        found: Json = {}
        for name, value in given.items():
            if is_absent(value) or (name == "caller" and value == DIRECT):
                continue
            if name in known:
                found[name] = value
            elif name in WITHOUT_EFFECT:
                self._dropped.add(name)
            elif place.is_typed:
                raise place.refusal(
                    f"Unsupported field '{name[:64]}' in '{place.path}'.",
                    code="unsupported_parameter",
                )
            else:
                self.drop_kind("fields", name)
        return found

    def text(self, content: Any, place: Place, depth: int = 0) -> str:
        """Returns the text of a `content` field, which has a text, a part or a list of parts."""
        if isinstance(content, str):
            return content
        parts = self.parts(content, place)
        return "\n".join([self.part(part, place, i, depth) for i, part in enumerate(parts)])

    def parts(self, content: Any, place: Place) -> list[Any]:
        """Returns the parts in a `content` field. Raises InvalidRequest if it has too many."""
        if not isinstance(content, list):
            return [] if content is None else [content]
        parts = as_list(content)
        if len(parts) > MAX_PARTS:
            raise place.invalid(f"Expected at most {MAX_PARTS} parts, got {len(parts)}")
        return parts

    def part(self, part: Any, content: Place, number: int, depth: int = 0) -> str:
        """Returns the text of a part, or a short replacement. Raises InvalidRequest if a person has
        just typed the part and it has no text."""
        if isinstance(part, str):
            return part
        if isinstance(part, int | float):
            return written(part)
        given = as_object(part) if isinstance(part, dict) else {"value": part}
        kind: Any = given.get("type")
        text = given.get(TEXTS.get(kind, "")) if isinstance(kind, str) else None
        if isinstance(text, str) and len(given) == 2:
            return text
        place = content.inner(number)
        if isinstance(text, str):
            self.fields(given, PART_FIELDS, place)
            return text
        if place.is_typed and kind not in DOCUMENTS:
            raise self._unreadable(kind, place)
        text = self._inner_text(given, place, depth)
        if text is None and place.is_typed:
            raise self._unreadable(kind, place)
        if text is None:
            return self._in_place_of(given, kind)
        fields = self.fields(given, DOCUMENT_FIELDS, place)
        headings = [fields[name] for name in HEADINGS if isinstance(fields.get(name), str)]
        return "\n".join([*headings, text])

    def spoken(self, content: Any, place: Place) -> tuple[str, str]:
        """Returns the text and the reasoning in the `content` of an assistant's message."""
        if isinstance(content, str):
            return content, ""
        texts: list[str] = []
        thoughts: list[str] = []
        for number, part in enumerate(self.parts(content, place)):
            thought = self.thought(part, place)
            if thought is None:
                texts.append(self.part(part, place, number))
            else:
                thoughts.append(thought)
        return "\n".join(texts), "\n".join(thoughts)

    def thought(self, part: Any, place: Place) -> str | None:
        """Returns the reasoning of a part. Returns None if the part is of another kind."""
        kind: Any = as_object(part).get("type")
        field = THOUGHTS.get(kind) if isinstance(kind, str) else None
        return None if field is None else self.text(part.get(field), place, MAX_NESTED_CONTENTS)

    def _unreadable(self, kind: Any, place: Place) -> InvalidRequest:
        shown = kind[:64] if isinstance(kind, str) else "a part without a type"
        if shown in TEXTS:
            return place.invalid(f"Expected a text in '{TEXTS[shown]}'")
        return place.refusal(
            f"Unsupported content in '{place.path}': '{shown}'. Only text is read.",
            code="unsupported_content",
        )

    def _inner_text(self, part: Json, place: Place, depth: int) -> str | None:
        """Returns the text in a document, a search result or a part of an unknown kind. Returns
        None if the part has no text."""
        if isinstance(part.get("text"), str):
            return part["text"]
        for inner in (part, as_object(part.get("source"))):
            if inner.get("type") == "text" and isinstance(inner.get("data"), str):
                return inner["data"]
            if isinstance(inner.get("content"), str | list) and depth < MAX_NESTED_CONTENTS:
                return self.text(inner["content"], place.inner("content"), depth + 1)
        return None

    def _in_place_of(self, part: Json, kind: Any) -> str:
        """Returns a short replacement for a part. Returns a value that is no part as JSON."""
        if kind is None:
            return written(part.get("value", part))
        noun = kind if isinstance(kind, str) and NAME.fullmatch(kind) else "part"
        noun = noun.removeprefix("input_").removesuffix("_url")
        self.drop(f"content.{noun}")
        return f"[{noun} omitted]"

    def call(self, id: Any, name: Any, arguments: Any, place: Place) -> list[MadeCall]:
        """Returns a list with the tool call of an earlier answer, empty if the call has no name.
        Raises InvalidRequest if the call's name or id is too long."""
        if not isinstance(name, str) or not name:
            self.drop("calls")
            return []
        if len(name) > MAX_NAME_CHARS:
            raise place.invalid(f"Expected a name of at most {MAX_NAME_CHARS} characters")
        return [MadeCall(self.id(id, place), name, self.arguments(arguments))]

    def result(self, id: Any, content: Any, place: Place) -> Message:
        """Returns the result of a tool as a message."""
        return Message("tool", self.text(content, place), call_id=self.id(id, place))

    def id(self, given: Any, place: Place) -> str:
        """Returns the id of a call, or an empty string if `given` is not a string. Raises
        InvalidRequest if the id is too long."""
        if not isinstance(given, str):
            return ""
        if len(given) > MAX_ID_CHARS:
            raise place.invalid(f"Expected an id of at most {MAX_ID_CHARS} characters")
        return given

    def arguments(self, given: Any) -> dict[str, Any]:
        """Returns the arguments of a call, which are given as an object or as JSON text. Drops
        arguments that are truncated or not an object."""
        if is_absent(given):
            return {}
        text = given if isinstance(given, str) else written(given)
        try:
            if text.count("[") + text.count("{") > MAX_DEPTH:
                check_json(text.encode(), len(text) * 4, param="arguments")
            if isinstance(given, dict):
                return as_object(given)
            return self._decoded(text) if text.strip() else {}
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError, InvalidRequest):
            self.drop("arguments")
            return {}

    def _decoded(self, text: str) -> dict[str, Any]:
        """Returns a JSON object. Raises msgspec.DecodeError."""
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError:
            whole = replace_lone_surrogates(text.encode())
            decoded = msgspec.json.decode(whole, type=dict[str, Any])
        self.drop(LONE_SURROGATES)
        return decoded


def as_object(value: Any) -> Json:
    """Returns the value if it is a JSON object, and otherwise an empty object."""
    return cast(Json, value) if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Returns the value if it is a list, and otherwise an empty list."""
    return cast(list[Any], value) if isinstance(value, list) else []


def is_absent(value: Any) -> bool:
    """Returns whether a field's value is null, [] or {}, which all mean absent."""
    return value is None or value == [] or value == {}


def written(value: Any) -> str:
    """Returns the value as JSON, or an empty string if it is nested too deeply."""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        return ""
