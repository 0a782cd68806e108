"""Loads the tokenizer and the chat template of a base model from its canonical folder."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from tokenizers import Tokenizer

from gateway.exceptions import ContextLengthExceeded, InvalidRequest, TokenizerUnavailable
from gateway.request import VERDICTS, Conversation
from gateway.text.chat_template import ChatTemplate
from gateway.text.detokenizer import Spelling
from gateway.text.long_texts import LONG, TOKEN_CHARS, LongTexts
from gateway.text.parsers import thoughts
from gateway.text.parsers.answer_form import AnswerForm, form_of
from gateway.text.prompt_encoder import PromptEncoder, TokenizerFile
from gateway.text.sliced_encoder import Kept
from gateway.text.template_process import RenderedChat, TemplateProcesses, TemplateSource

log = logging.getLogger(__name__)

MAX_TOKENIZERS = 32
"""Maximum number of tokenizers in memory. If there are more, the least recently used one is
dropped."""
RETRY_S = 1.0
"""Seconds until another attempt to load a tokenizer after a failure."""

# The threads of the tokenizers library are turned off, because encoding a short prompt takes less
# time than passing it to a thread.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

A = TypeVar("A")

SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

MANY_MESSAGES = 64
"""Maximum number of messages that a base model's template renders on the event loop. None of 15
published templates takes more than 7 ms for such a conversation, and up to 38 ms for 256."""


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Sampling defaults from the model's generation_config.json."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ChatTokens(NamedTuple):
    """Token ids of a conversation's prompt."""

    tokens: list[int]
    change: str
    """How the prompt differs from the turns (see `Rendered`), or empty."""
    form: AnswerForm
    """Form in which a model with this chat template writes its answers."""


class _PoolingFile(msgspec.Struct):
    pooling: Literal["last", "mean", "cls"] | None = None


class ModelTokenizer:
    """Tokenizer of one base model. Must be constructed in a thread, because this reads files and
    compiles the chat template."""

    def __init__(self, folder: Path, long_texts: LongTexts, processes: TemplateProcesses) -> None:
        """Raises UnsupportedDecoder if the tokenizer's decoder is not supported, and OSError if a
        file cannot be read."""
        raw = (folder / "tokenizer.json").read_bytes()
        file = msgspec.json.decode(raw, type=TokenizerFile)
        config: dict[str, Any] = _read_json(folder / "tokenizer_config.json")
        self._tokenizer = Tokenizer.from_buffer(raw)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_tokens = tuple(_special_tokens(config).items())
        self.spelling = Spelling(self._tokenizer, file.decoder)
        self.defaults = msgspec.convert(
            _read_json(folder / "generation_config.json"), SamplingDefaults
        )
        self.pooling = msgspec.convert(_read_json(folder / "pooling.json"), _PoolingFile).pooling
        """Pooling of the last hidden states to an embedding, from the model's pooling.json. None if
        the model has no such file, or the file names no pooling."""
        self._source = source = _template_source(folder, config)
        self._prompts = PromptEncoder(self._tokenizer, file, source or "", long_texts)
        self._long_texts = long_texts
        self._longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        """Maximum number of characters for which one token stands."""
        self._template = None if source is None else ChatTemplate(source, _special_tokens(config))
        self._processes = processes

    async def encode_many(
        self,
        texts: list[str],
        *,
        domain: str,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        kept: Kept | None = None,
        check_sum: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """Returns the token ids of each text. Long texts of one `domain` are encoded one after the
        other. If `kept` is given, returns only these tokens of each text, and the special tokens.
        Raises ContextLengthExceeded as soon as a text has more than `max_tokens` tokens. If the
        length of a text already shows this, raises before encoding. Calls `check_sum` with the
        number of tokens so far after each text, and stops if it raises."""
        self.check_chars(max(map(len, texts), default=0), max_tokens)
        return await self._prompts.encode_each(
            texts,
            domain,
            add_special_tokens=add_special_tokens,
            max_tokens=max_tokens,
            kept=kept,
            check_sum=check_sum,
        )

    async def encode_chat(
        self,
        conversation: Conversation,
        *,
        domain: str,
        template: str | None = None,
        max_tokens: int | None = None,
        add_special_tokens: bool = False,
        kept: Kept | None = None,
    ) -> ChatTokens:
        """Renders a conversation and returns its token ids. The tokenizer adds special tokens only
        if `add_special_tokens` is set, because chat templates usually write the special tokens
        themselves. Token ids of pieces that the same `domain` has encoded before come from a cache.
        If `kept` is given, returns only these tokens, and the special tokens that the tokenizer
        adds. Raises InvalidRequest if the template refuses the conversation, and
        ContextLengthExceeded if its text has more than `max_tokens` tokens."""
        chat = await self.render(conversation, domain=domain, template=template)
        text, change = chat.rendered
        self.check_chars(len(text), max_tokens)
        if add_special_tokens or (kept is not None and len(text) > LONG):
            (tokens,) = await self._prompts.encode_each(
                [text],
                domain,
                add_special_tokens=add_special_tokens,
                max_tokens=max_tokens,
                kept=kept,
            )
        else:
            tokens = await self._prompts.encode(text, domain, max_tokens=max_tokens)
            tokens = tokens if kept is None else kept.of(tokens)
        form = form_of(template or self._source or "", shows_tools=chat.shows_tools)
        return ChatTokens(tokens, change, form)

    async def render(
        self, conversation: Conversation, *, domain: str, template: str | None = None
    ) -> RenderedChat:
        """Renders a conversation with `template`, the approved chat template of an adapter version,
        or with the model's own template if `template` is None. Renders in a process with limits if
        the template is an adapter's or the conversation is large. Raises InvalidRequest if the
        model has no template, or the template is not valid or refuses the conversation."""
        source = self._source if template is None else template
        if source is None:
            raise InvalidRequest("This model has no chat template; use completions.", param="model")
        is_large = conversation.num_chars > LONG or len(conversation.messages) > MANY_MESSAGES
        if template is None and self._template is not None and not is_large:
            return RenderedChat(self._template.render(conversation), self._template.shows_tools)
        source = TemplateSource(source, self._special_tokens)
        return await self._processes.render(domain, source, conversation)

    async def decode(
        self,
        tokens: list[int],
        *,
        domain: str,
        skip_special_tokens: bool = False,
        max_bytes: int | None = None,
    ) -> str:
        """Returns the text of token ids. Long lists of one `domain` (a tenant or its sharing group)
        are decoded one by one. Raises InvalidRequest if the text exceeds `max_bytes` bytes."""

        def decode() -> str:
            if max_bytes is not None:
                self._check_bytes(tokens, max_bytes)
            return self.text(tokens, skip_special_tokens=skip_special_tokens)

        return await self.work_on([tokens], domain, decode)

    def text(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of token ids, decoded on the caller's thread."""
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    @property
    def num_added_tokens(self) -> int:
        """Number of special tokens that the tokenizer adds to a text."""
        return sum(map(len, self._prompts.added_tokens))

    @cached_property
    def verdict_tokens(self) -> tuple[int, ...]:
        """First token of the answer "no", and first token of the answer "yes". Raises
        InvalidRequest if they are equal, because such a model cannot answer with one token."""
        tokens = tuple(
            self._tokenizer.encode(word, add_special_tokens=False).ids[0] for word in VERDICTS
        )
        if len(set(tokens)) < len(tokens):
            raise InvalidRequest(
                "This model's tokens do not tell 'yes' from 'no'; it cannot score texts.",
                param="model",
            )
        return tokens

    def token_strings(self, tokens: list[int]) -> list[str]:
        """Returns the tokens as the vocabulary spells them, for example `Ġparcel`."""
        spelled = {token: self._tokenizer.id_to_token(token) for token in set(tokens)}
        return [spelled[token] or "" for token in tokens]

    def special_id(self, text: str) -> int | None:
        """Returns the id of a special token. Returns None if the text is not a special token."""
        return self._tokenizer.token_to_id(text) if text in self.spelling.special else None

    @cached_property
    def thought_tokens(self) -> tuple[int, int] | None:
        """Token that begins a thought, and token that ends it. None if one of the markers is not a
        single token."""
        begin, end = (self._tokenizer.token_to_id(marker) for marker in thoughts.MARKERS)
        return None if begin is None or end is None else (begin, end)

    async def work_on(self, prompts: Sequence[list[int]], domain: str, work: Callable[[], A]) -> A:
        """Runs `work`, whose time grows with the number of tokens in `prompts`. If the prompts have
        many tokens, runs `work` in a thread, one call at a time for each `domain`."""
        size = sum([len(prompt) for prompt in prompts]) * TOKEN_CHARS
        return await self._long_texts.do(domain, size, work)

    def fewest_tokens(self, num_chars: int) -> int:
        """Returns the minimum number of tokens that a text of `num_chars` characters has."""
        return -(-num_chars // self._longest)

    def check_chars(self, num_chars: int, max_tokens: int | None) -> None:
        """Raises ContextLengthExceeded if a text of `num_chars` characters must have more than
        `max_tokens` tokens. Characters that the tokenizer's normalizer would remove also count."""
        if max_tokens is not None and self.fewest_tokens(num_chars) > max_tokens:
            raise ContextLengthExceeded(
                f"At most {max_tokens} tokens are read for this model; your text has {num_chars} "
                "characters, which are more tokens than that. Shorten it."
            )

    def _check_bytes(self, tokens: list[int], max_bytes: int) -> None:
        num_bytes = sum(map(len, map(self.spelling.all.__getitem__, tokens)))
        if num_bytes > max_bytes:
            raise InvalidRequest(
                f"These tokens spell {num_bytes} bytes; at most {max_bytes} are answered at a "
                "time. Send fewer.",
                param="tokens",
                code="answer_too_large",
            )


class Tokenizers:
    """Cache of the most recently used tokenizers, by model digest. Tokenizers are loaded in
    threads."""

    def __init__(self, find_folder: Callable[[str], Path]) -> None:
        self._find_folder = find_folder
        self._long_texts = LongTexts()
        self._processes = TemplateProcesses()
        self._loading: OrderedDict[str, asyncio.Task[ModelTokenizer]] = OrderedDict()

    async def get(self, digest: str) -> ModelTokenizer:
        """Returns the model's tokenizer. Raises TokenizerUnavailable if it cannot be loaded. For
        `RETRY_S` after a failure, raises the same error without another attempt."""
        task = self._loading.get(digest)
        if task is None:
            task = self._loading[digest] = asyncio.create_task(self._load(digest))
            if len(self._loading) > MAX_TOKENIZERS:
                self._loading.popitem(last=False)
        self._loading.move_to_end(digest)
        return task.result() if task.done() else await asyncio.shield(task)

    async def _load(self, digest: str) -> ModelTokenizer:
        try:
            return await asyncio.to_thread(self._read, digest)
        except Exception as error:  # the tokenizers library raises only Exception
            log.error("loading the tokenizer of model %s failed: %r", digest, error)
            asyncio.get_running_loop().call_later(RETRY_S, self._loading.pop, digest, None)
            raise TokenizerUnavailable(
                "The model's tokenizer could not be loaded; the gateway's log has the reason."
            ) from error

    def _read(self, digest: str) -> ModelTokenizer:
        return ModelTokenizer(self._find_folder(digest), self._long_texts, self._processes)

    def close(self) -> None:
        self._processes.close()


def _read_json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes()) if path.exists() else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Returns the texts of the special tokens in a tokenizer config, by field, such as `bos_token`.
    Some configs have them as objects instead of texts."""
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
