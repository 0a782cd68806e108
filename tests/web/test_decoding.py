from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
import pytest

from web.decoding import Fault, find_fault


class Color(Enum):
    RED = "red"


class A(msgspec.Struct, tag="a", tag_field="type"):
    x: int


class B(msgspec.Struct, tag="b", tag_field="type"):
    y: Literal["p", "q"] | None = None


class Body(msgspec.Struct, forbid_unknown_fields=True):
    tool: A | B | None = None
    modes: list[Literal["u", "v"]] = []
    sizes: dict[str, Annotated[Literal[1, 2], msgspec.Meta(description="a size")]] = {}
    color: Color = Color.RED
    free: str = ""


@pytest.mark.parametrize(
    ("body", "reason", "path"),
    [
        ({"tool": {"type": "z"}}, "Invalid value 'z'; allowed: 'a', 'b'", "tool.type"),
        ({"tool": {"type": "b", "y": "r"}}, "'r'; allowed: 'p', 'q'", "tool.y"),
        ({"modes": ["u", "w"]}, "'w'; allowed: 'u', 'v'", "modes[1]"),
        ({"sizes": {"k": 3}}, "3; allowed: 1, 2", "sizes[...]"),
        ({"color": "blue"}, "'blue'; allowed: 'red'", "color"),
        ({"free": 1}, "Expected `str`, got `int`", "free"),
        ({"modes": 1}, "Expected `array`, got `int`", "modes"),
    ],
)
def test_faults_list_the_allowed_values(body: Any, reason: str, path: str) -> None:
    fault = fault_of(body)
    assert fault.reason.endswith(reason)
    assert fault.path == fault.field == path


def test_faults_name_unknown_and_missing_fields() -> None:
    assert fault_of({"more": 1})[1:] == (None, "more", None)
    inside = fault_of({"tool": {"type": "a"}})
    assert inside[1:] == ("tool", None, "x")
    assert inside.field == "tool.x"
    assert fault_of([])[1:] == (None, None, None)


def test_faults_show_only_the_beginning_of_a_client_s_text() -> None:
    fault = fault_of({"color": " - at `$" * 1000})
    assert fault.path == "color" and len(fault.reason) < 300
    assert len(fault_of({"m" * 1000: 1}).field) == 256


def fault_of(value: Any) -> Fault:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(value, Body)
    return find_fault(caught.value, Body)
