"""Checks the syntax of an upload's chat template. A template is parsed but never rendered.

Parsing takes up to a second, because a template has up to 64 KiB. Therefore uploads are parsed in
the process that validates their files.
"""

from __future__ import annotations

import jinja2

from sandbox.chat_templates import TEMPLATES
from store.errors import Invalid

MAX_REASON_CHARS = 256


def check_template(text: str, field: str) -> None:
    """Raises Invalid if the text is not valid Jinja. `field` is the name of the upload's field that
    has the template's serving data."""
    try:
        TEMPLATES.parse(text)
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
