"""Jinja environment of chat templates, which parses and renders as `apply_chat_template` of
transformers. The admin plane checks templates with it, and gateways render them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """Extension for the block `{% generation %}`, which marks answers for training. Renders only
    the block's body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns the value as JSON. Does not escape HTML, unlike Jinja's own filter, because chat
    templates expect unescaped text."""
    options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "sort_keys": sort_keys}
    return json.dumps(value, indent=indent, separators=separators, **options)


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


TEMPLATES = _make_environment()
