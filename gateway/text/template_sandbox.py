"""Sandbox process that renders chat templates, and keeps those that it has compiled."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from gateway.exceptions import InvalidRequest
from gateway.text.chat_template import ChatTemplate
from gateway.text.template_process import Refused, RenderedChat, RenderingWork, TemplateSource
from sandbox.server import serve_in_place


@lru_cache(64)
def _compiled(source: TemplateSource) -> ChatTemplate:
    try:
        return ChatTemplate(source.text, dict(source.special_tokens))
    except MemoryError:
        raise
    except Exception as error:  # Jinja and Python's compiler raise many kinds
        raise InvalidRequest(
            f"The model's chat template is not valid: {error}", param="model"
        ) from error


def _work(raw: bytes) -> bytes:
    work = msgspec.json.decode(raw, type=RenderingWork)
    try:
        template = _compiled(work.source)
        rendered = template.render(work.conversation)
        return msgspec.json.encode(RenderedChat(rendered, template.shows_tools))
    except InvalidRequest as error:
        refused = Refused(error.message.encode(errors="replace").decode(), error.param)
    except UnicodeEncodeError:
        refused = Refused("The model's chat template writes text that is not Unicode.", "messages")
    return msgspec.json.encode(refused)


if __name__ == "__main__":
    serve_in_place(_work)
