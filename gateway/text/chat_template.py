"""Chat templates: conversations to text, sandboxed and within a budget.

Templates run in process because an admin stands behind each: those of imported models, and those
of adapter versions that an admin has approved. None ever comes from a request.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import jinja2

from gateway.exceptions import InvalidRequest
from gateway.messages import Message
from gateway.text.template_budget import BudgetExceeded, limited
from gateway.text.template_sandbox import MAX_ERROR_CHARS, make_environment

RENDERING_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a template's own expressions may raise on messages it did not expect."""


class TemplateOverBudget(InvalidRequest):
    """A rendering takes more work than the conversation's budget."""


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

    def render(
        self, messages: list[Message], *, steps: int, add_generation_prompt: bool = True
    ) -> str:
        """Raises InvalidRequest if the template refuses the conversation, TemplateOverBudget if
        that takes more `steps` of `template_budget`."""
        try:
            with limited(steps):
                return self._template.render(
                    messages=[message.for_template() for message in messages],
                    add_generation_prompt=add_generation_prompt,
                )
        except BudgetExceeded:
            raise TemplateOverBudget(
                f"The model's chat template takes more than the {steps} steps that a conversation "
                "of this size may take.",
                param="messages",
                code="template_budget_exceeded",
            ) from None
        except (jinja2.TemplateError, *RENDERING_ERRORS) as error:
            raise InvalidRequest(
                f"The model's chat template refused: {str(error)[:MAX_ERROR_CHARS]}",
                param="messages",
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


ENVIRONMENT = make_environment()
