"""Renders chat templates in processes with limits of memory and time.

The templates of adapters are rendered there, because tenants wrote them, and long conversations,
because they take long. `template_sandbox` is the program of these processes.
"""

from __future__ import annotations

import msgspec

from gateway.exceptions import InvalidRequest, TokenizerUnavailable
from gateway.request import Conversation
from gateway.text.chat_template import Rendered
from gateway.text.long_texts import LongTexts
from sandbox.sandboxes import Sandboxes, SandboxFailed
from sandbox.task import Bounds, Died

NUM_PROCESSES = 4
"""Maximum number of processes of a gateway. Each takes about 45 MB while it is idle."""
CPU_S = 0.25
CPU_S_PER_TEMPLATE_CHAR = 5e-5
"""CPU seconds allowed for each character of a template, which may have to be compiled first."""
CPU_S_PER_MESSAGE = 1e-3
CPU_S_PER_CHAR = 1e-6
WALL_S = 30.0
MEMORY_BYTES = 128 << 20
MEMORY_BYTES_PER_CHAR = 64
PROMPT_BYTES = 16 << 20
PROMPT_BYTES_PER_CHAR = 16


class TemplateSource(msgspec.Struct, frozen=True):
    """Text of a chat template, and the special tokens of its model by name."""

    text: str
    special_tokens: tuple[tuple[str, str], ...]


class RenderedChat(msgspec.Struct, frozen=True, tag=True):
    """Rendered prompt, and whether its template renders tools."""

    rendered: Rendered
    shows_tools: bool


class Refused(msgspec.Struct, frozen=True, tag=True):
    message: str
    param: str | None


class RenderingWork(msgspec.Struct, frozen=True):
    source: TemplateSource
    conversation: Conversation


class TemplateProcesses:
    """Processes of one gateway that render chat templates."""

    def __init__(self) -> None:
        self._sandboxes = Sandboxes("gateway.text.template_sandbox")
        self._turns = LongTexts(NUM_PROCESSES)

    async def render(
        self, domain: str, source: TemplateSource, conversation: Conversation
    ) -> RenderedChat:
        """Renders a conversation. Renders one conversation of a `domain` at a time. Raises
        InvalidRequest if the template is not valid, refuses the conversation or exceeds its
        limits."""
        return await self._turns.run(domain, lambda: self._render(source, conversation))

    def _render(self, source: TemplateSource, conversation: Conversation) -> RenderedChat:
        num_chars = conversation.num_chars
        bounds = Bounds(
            memory_bytes=MEMORY_BYTES + MEMORY_BYTES_PER_CHAR * num_chars,
            cpu_s=CPU_S
            + CPU_S_PER_TEMPLATE_CHAR * len(source.text)
            + CPU_S_PER_MESSAGE * len(conversation.messages)
            + CPU_S_PER_CHAR * num_chars,
            wall_s=WALL_S,
            outcome_bytes=PROMPT_BYTES + PROMPT_BYTES_PER_CHAR * num_chars,
        )
        work = msgspec.json.encode(RenderingWork(source, conversation))
        try:
            answer = self._sandboxes.task(work, bounds).run()
        except SandboxFailed as error:
            raise TokenizerUnavailable("The chat template could not be rendered now.") from error
        if isinstance(answer, Died):
            raise InvalidRequest(
                f"The model's chat template takes more than the {bounds.cpu_s:.1f} s or the "
                f"{bounds.memory_bytes >> 20} MiB that a conversation of this size may take.",
                param="messages",
                code="template_budget_exceeded",
            )
        outcome = msgspec.json.decode(answer, type=RenderedChat | Refused)
        if isinstance(outcome, Refused):
            raise InvalidRequest(outcome.message, param=outcome.param)
        return outcome

    def close(self) -> None:
        self._sandboxes.close()
