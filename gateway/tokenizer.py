"""Text to token ids and back, and the chat template, from a base model's canonical folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from gateway.chat_template import ChatTemplate, CompiledTemplates
from gateway.detokenizer import Spelling
from gateway.errors import InvalidRequest
from gateway.prompt_encoder import THREAD_THRESHOLD, PromptEncoder, encode_each
from gateway.schemas import Message

# A short prompt takes less time than handing it to the library's threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What the model's generation_config.json has for what a caller leaves out."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class _TokenizerFile(msgspec.Struct):
    decoder: dict[str, Any] | None = None


class ModelTokenizer:
    """Its constructor reads files and compiles the template: call it in a thread."""

    def __init__(self, folder: Path) -> None:
        """Raises UnsupportedDecoder or OSError."""
        source = (folder / "tokenizer.json").read_bytes()
        parts = msgspec.json.decode(source, type=_TokenizerFile)
        config: dict[str, Any] = _read_json(folder / "tokenizer_config.json")
        self._tokenizer = Tokenizer.from_buffer(source)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        special_tokens = _special_tokens(config)
        self.spelling = Spelling(self._tokenizer, parts.decoder)
        self.defaults = msgspec.convert(
            _read_json(folder / "generation_config.json"), SamplingDefaults
        )
        template = _template_source(folder, config)
        self._prompts = PromptEncoder(self._tokenizer, source, template or "")
        self._template = None if template is None else ChatTemplate(template, special_tokens)
        self._templates = CompiledTemplates(special_tokens)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return (await self.encode_many([text], add_special_tokens=add_special_tokens))[0]

    async def encode_many(
        self, texts: list[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        return await encode_each(self._tokenizer, texts, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self,
        messages: list[Message],
        *,
        domain: str,
        template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """As `render`; the template writes the special tokens itself, so none are added. `domain`:
        inside one, what was encoded before need not be again."""
        text = await self.render(
            messages, template=template, add_generation_prompt=add_generation_prompt
        )
        return await self._prompts.encode(text, domain)

    async def render(
        self,
        messages: list[Message],
        *,
        template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """By an adapter version's approved `template`, else the model's own. Raises InvalidRequest
        if it refuses the conversation, or there is none."""
        chosen = self._template if template is None else await self._templates.get(template)
        if chosen is None:
            raise InvalidRequest("This model has no chat template; use completions.", param="model")
        return chosen.render(messages, add_generation_prompt=add_generation_prompt)

    async def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        decode = self._tokenizer.decode
        if len(tokens) <= THREAD_THRESHOLD:
            return decode(tokens, skip_special_tokens=skip_special_tokens)
        return await asyncio.to_thread(decode, tokens, skip_special_tokens)


class Tokenizers:
    """The tokenizer of each model digest, loaded once from the folder found in a thread."""

    def __init__(self, find_folder: Callable[[str], Path]) -> None:
        self._find_folder = find_folder
        self._loading: dict[str, asyncio.Task[ModelTokenizer]] = {}

    async def get(self, digest: str) -> ModelTokenizer:
        task = self._loading.get(digest)
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.create_task(asyncio.to_thread(self._load, digest))
            self._loading[digest] = task
        return task.result() if task.done() else await asyncio.shield(task)

    def _load(self, digest: str) -> ModelTokenizer:
        return ModelTokenizer(self._find_folder(digest))


def _read_json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes()) if path.exists() else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and its like as text; older configs write them as objects."""
    entries = {f"{name}_token": config.get(f"{name}_token") for name in SPECIAL_TOKENS}
    return {
        name: entry["content"] if isinstance(entry, dict) else str(entry)
        for name, entry in entries.items()
        if entry is not None
    }


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text()
    template: str | list[dict[str, str]] | None = config.get("chat_template")
    if isinstance(template, list):
        return next((t["template"] for t in template if t["name"] == "default"), None)
    return template
