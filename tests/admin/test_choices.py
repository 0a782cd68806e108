from __future__ import annotations

import re
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
import pytest

from web.choices import list_choices


class Color(Enum):
    RED = "red"


class A(msgspec.Struct, tag="a", tag_field="type"):
    x: int


class B(msgspec.Struct, tag="b", tag_field="type"):
    y: Literal["p", "q"] | None = None


class Body(msgspec.Struct):
    tool: A | B | None = None
    modes: list[Literal["u", "v"]] = []
    sizes: dict[str, Annotated[Literal[1, 2], msgspec.Meta(description="a size")]] = {}
    color: Color = Color.RED
    free: str = ""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"tool": {"type": "z"}}, "Invalid value 'z'; allowed: 'a', 'b' - at `$.tool.type`"),
        ({"tool": {"type": "b", "y": "r"}}, "'r'; allowed: 'p', 'q' - at `$.tool.y`"),
        ({"modes": ["u", "w"]}, "'w'; allowed: 'u', 'v' - at `$.modes[1]`"),
        ({"sizes": {"k": 3}}, "3; allowed: 1, 2 - at `$.sizes[...]`"),
        ({"color": "blue"}, "'blue'; allowed: 'red' - at `$.color`"),
        ({"free": 1}, "Expected `str`, got `int` - at `$.free`"),
        ({"modes": 1}, "Expected `array`, got `int` - at `$.modes`"),
    ],
)
def test_allowed_values_are_listed(body: Any, expected: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(body, Body)
    assert re.search(re.escape(expected) + "$", list_choices(str(caught.value), Body))
