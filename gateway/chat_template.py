"""Chat templates: conversations to text, sandboxed.

Templates run in process because an operator stands behind each: those of imported models, and those
of adapter versions that an admin has approved. None ever comes from a request.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import InvalidRequest
from gateway.schemas import Message

RENDERING_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError, RecursionError)
"""What a template's own expressions may raise on messages it did not expect."""


class ChatTemplate:
    """Compiled. Its constructor takes a while for a long text."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        self._template: Any = ENVIRONMENT.from_string(source)
        # One plain dict: Jinja's chain of them costs as much as the rendering.
        self._template.globals = {
            **self._template.globals,
            **special_tokens,
            "tools": None,
            "documents": None,
        }

    def render(self, messages: list[Message], *, add_generation_prompt: bool = True) -> str:
        """Raises InvalidRequest if the template refuses the conversation."""
        try:
            return self._template.render(
                messages=[message.for_template() for message in messages],
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, *RENDERING_ERRORS) as error:
            raise InvalidRequest(
                f"The model's chat template refused: {error}", param="messages"
            ) from error


class CompiledTemplates:
    """The templates of adapter versions on one base model, compiled when first used."""

    def __init__(self, special_tokens: dict[str, str], capacity: int = 256) -> None:
        self._special_tokens = special_tokens
        self._capacity = capacity
        self._compiling: OrderedDict[str, asyncio.Task[ChatTemplate]] = OrderedDict()

    async def get(self, source: str) -> ChatTemplate:
        """Raises InvalidRequest if it is no template."""
        task = self._compiling.get(source)
        if task is None:
            task = asyncio.create_task(
                asyncio.to_thread(ChatTemplate, source, self._special_tokens)
            )
            self._compiling[source] = task
            if len(self._compiling) > self._capacity:
                self._compiling.popitem(last=False)
        self._compiling.move_to_end(source)
        try:
            return task.result() if task.done() else await asyncio.shield(task)
        except (jinja2.TemplateSyntaxError, SyntaxError, RecursionError) as error:
            raise InvalidRequest(
                f"The model's chat template is not valid: {error}", param="model"
            ) from error


class _Generation(Extension):
    """`{% generation %}`, which marks answers for training, renders as what stands inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Takes no private names, which the sandbox guards on every other object."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace may not have {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which chat templates do not mean."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Environment(ImmutableSandboxedEnvironment):
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As the sandbox has it; of `loop`, which every message's turn asks for, without its many
        questions."""
        if type(obj) is LoopContext:
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)


def _environment() -> ImmutableSandboxedEnvironment:
    """Renders as transformers' apply_chat_template does."""
    environment: Any = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace
    )
    return environment


ENVIRONMENT = _environment()
