"""Checks the syntax of an upload's chat template. A template is parsed but never rendered.

Parsing takes up to a second, because a template has up to 64 KiB. Therefore uploads are parsed in
the process that validates their files.
"""

from __future__ import annotations

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from store.errors import Invalid

MAX_REASON_CHARS = 256


class _Generation(Extension):
    """Extension that parses `{% generation %}`, which transformers adds to Jinja."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_SYNTAX = ImmutableSandboxedEnvironment(extensions=[loopcontrols, _Generation])


def check_template(text: str, field: str) -> None:
    """Raises Invalid if the text is not valid Jinja. `field` is the name of the upload's field that
    has the template's serving data."""
    try:
        _SYNTAX.parse(text)
    except jinja2.TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:  # for example an integer of 5,000 digits
        reason = str(error)
    else:
        return
    raise Invalid(
        f"the chat template is not valid Jinja, {reason[:MAX_REASON_CHARS]}",
        "template_syntax",
        f"{field}.chat_template",
    )
