"""Renders conversations with chat templates, in Jinja's sandbox.

A template never comes from a request. An admin imports base models with their templates, and
approves the templates of adapter versions, which are rendered in processes with limits (see
`template_process`).
"""

from __future__ import annotations

import hashlib
import re
from itertools import chain
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes

from gateway.exceptions import InvalidRequest
from gateway.request import Conversation, Message, Tool
from gateway.text.shown_turns import ShownTurns, contains, shape_of
from gateway.text.template_turns import folded, in_plain_messages
from sandbox.chat_templates import TEMPLATES

MAX_ERROR_CHARS = 1000
RENDERING_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that expressions in a template may raise for messages that the template does not
expect."""
FINAL_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Text appended to the message that the answer is to continue, so that the end of this message can
be found in the rendered prompt. The trailing space shows whether the template trims contents, as in
transformers."""
FOLDED_TURNS = "folded_turns"
"""Name of the change that turns were simplified, because the template refused them or left out some
of them."""
HIDDEN_TURNS = "hidden_turns"
"""Name of the change that the prompt lacks some turns, because the template leaves them out in each
form."""
ASKING = [Message("user", "?")]
TOOL_CONVERSATIONS = [
    Conversation(messages, [Tool(name="lookup")])
    for messages in (ASKING, [Message("system", "!"), *ASKING])
]
"""Conversations with which it is found out whether a template shows tools."""

ROLES = frozenset(("system", "user", "assistant", "tool"))

SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


class NotShown(InvalidRequest):
    """Error for a last message that the template does not show as it is, so that an answer cannot
    continue it."""


class TemplateRefused(InvalidRequest):
    """Error for a conversation that the template refuses, or cannot render because an expression in
    the template fails."""


class Rendered(NamedTuple):
    """Rendered text of a prompt."""

    text: str
    change: str = ""
    """`FOLDED_TURNS` or `HIDDEN_TURNS`, or empty if the prompt shows the turns as they are."""


class ChatTemplate:
    """Compiled chat template. Constructing it takes long if the template is long."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError if the syntax of `source` is invalid."""
        parsed = TEMPLATES.parse(source)
        mentions_tools = any(name.name == "tools" for name in parsed.find_all(nodes.Name))
        texts = {const.value for const in parsed.find_all(nodes.Const)}
        self._roles = ROLES | {text for text in texts if isinstance(text, str)}
        """Roles that a message may have: the usual ones, and each text in the template."""
        self._wants_short_ids = "length 9" in source
        self._template: Any = TEMPLATES.from_string(parsed)
        # One dict replaces Jinja's chain of dicts, because looking up names in the chain takes as
        # long as the rendering itself.
        self._template.globals = {
            **self._template.globals,
            **special_tokens,
            "tools": None,
            "documents": None,
        }
        # A template that shows neither form gets texts.
        for takes_parts in (False, True, False):
            self._takes_parts = takes_parts
            """Whether the template expects a message's content as a list of parts, not as a
            text."""
            self._shown_turns = ShownTurns(self._prompt_or_none)
            if self._shows_all(Conversation(ASKING)):
                break
        self.shows_tools = mentions_tools and all(map(self._shows_all, TOOL_CONVERSATIONS))
        """Whether the template itself renders tools. If not, they are described in plain
        messages."""

    def render(self, conversation: Conversation) -> Rendered:
        """Renders the conversation. If the template refuses its turns or leaves out some of them,
        tries simplified forms of them (see `template_turns`). Describes tools in plain messages if
        the template does not render tools. If no form is shown completely, renders the turns as
        they are. Raises TemplateRefused if the template refuses this too."""
        self._check_roles(conversation.messages)
        if conversation.uses_tools and not self.shows_tools:
            conversation = in_plain_messages(conversation)
        for number, form in enumerate(chain([conversation], folded(conversation))):
            shape = shape_of(form)
            if not self._shown_turns.are_shown(form, shape.shortened()):
                continue
            try:
                text = self._prompt(form)
            except TemplateRefused:
                continue
            if contains(text, form) or self._shown_turns.are_shown(form, shape):
                return Rendered(text, FOLDED_TURNS if number else "")
        return Rendered(self._prompt(conversation), HIDDEN_TURNS)

    def _check_roles(self, messages: list[Message]) -> None:
        for number, message in enumerate(messages):
            if message.role not in self._roles:
                raise InvalidRequest(
                    f"Invalid value for 'messages[{number}].role': Expected one of system, "
                    "developer, user, assistant, tool, function, or a role that the model's chat "
                    f"template names; got {message.role!r}.",
                    param="messages",
                )

    def _shows_all(self, conversation: Conversation) -> bool:
        """Returns whether the template shows all of a conversation, or refuses it."""
        return self._shown_turns.are_shown(conversation, shape_of(conversation))

    def _prompt_or_none(self, conversation: Conversation) -> str | None:
        try:
            return self._prompt(conversation)
        except TemplateRefused:
            return None

    def _prompt(self, conversation: Conversation) -> str:
        last = conversation.messages[-1]
        if conversation.continue_final_message and last.reasoning and not last.content.strip():
            try:
                return self._prompt_until(conversation, "reasoning_content")
            except NotShown:
                pass
        return self._prompt_until(conversation, "content")

    def _prompt_until(self, conversation: Conversation, field: str) -> str:
        """Returns the prompt. If the answer continues the last message, the prompt ends with this
        field of the message."""
        messages = [message.for_template() for message in conversation.messages]
        if self._wants_short_ids:
            _shorten_ids(messages)
        if conversation.continue_final_message:
            messages[-1][field] += FINAL_MARK
        if self._takes_parts:
            for message in messages:
                message["content"] = [{"type": "text", "text": message["content"]}]
        variables = conversation.template_arguments | {
            "messages": messages,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        if conversation.tools:
            variables["tools"] = [tool.for_template() for tool in conversation.tools]
        text = self._text(variables)
        return _until_mark(text) if conversation.continue_final_message else text

    def _text(self, variables: dict[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except (jinja2.TemplateError, *RENDERING_ERRORS) as error:
            raise TemplateRefused(
                f"The model's chat template refused: {str(error)[:MAX_ERROR_CHARS]}",
                param="messages",
            ) from error


def _shorten_ids(messages: list[dict[str, Any]]) -> None:
    """Shortens the ids of calls, because Mistral's templates accept only ids of nine letters and
    digits."""
    for message in messages:
        if "tool_call_id" in message:
            message["tool_call_id"] = _short_id(message["tool_call_id"])
        for call in message.get("tool_calls", ()):
            call["id"] = _short_id(call["id"])


def _short_id(id: str) -> str:
    return id if SHORT_ID.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]


def _until_mark(text: str) -> str:
    """Returns the text up to the end of the last message's text. Raises NotShown if the
    template does not render that content unchanged."""
    end = text.rfind(FINAL_MARK.strip())
    if end < 0:
        raise NotShown(
            "The model's chat template does not show the last message as it is, so that an answer "
            "cannot continue it.",
            param="continue_final_message",
        )
    is_trimmed = not text.startswith(FINAL_MARK, end)
    return text[:end].rstrip() if is_trimmed else text[:end]
