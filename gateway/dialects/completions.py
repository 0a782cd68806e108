"""Translates OpenAI's text completions: POST /v1/completions."""

from __future__ import annotations

import codecs
from collections import defaultdict
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from gateway.dialects.dialect import Answer, AnswerContext, Dialect
from gateway.dialects.generation_fields import TokenId
from gateway.dialects.openai_fields import (
    MAX_SEQUENCES,
    MaxTokens,
    OpenAIRequest,
    Refusal,
    TokenIds,
    TopLogprobs,
    most_tokens,
    prompts_of,
)
from gateway.dialects.openai_format import OpenAIFormat, encode, finite, token_name
from gateway.dispatch.sequence import Delta, Scored
from gateway.exceptions import InvalidRequest
from gateway.limits.bounds import MAX_TOKEN_IDS
from gateway.request import Request

UTF8 = codecs.getincrementaldecoder("utf-8")


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions."""

    example: ClassVar[dict[str, Any]] = {
        "model": "support-bot",
        "prompt": "Once",
        "max_tokens": 16,
    }

    prompt: (
        str
        | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_TOKEN_IDS)]
    )
    max_tokens: MaxTokens | None = None
    """-1 counts as absent. 0 is allowed with `echo`."""
    logprobs: TopLogprobs | None = None
    echo: bool | None = None

    add_special_tokens: Annotated[
        bool | None,
        Refusal("A text begins with the model's own; send token ids for any others.", (True,)),
    ] = None
    prompt_embeds: Annotated[Any, Refusal("Prompts are text or token ids.")] = None
    suffix: Annotated[Any, Refusal("Text is continued, not filled in.", ("",))] = None

    @property
    def most_tokens(self) -> int | None:
        """Maximum tokens of the answer, or None for the default."""
        return most_tokens(self.max_tokens, "max_tokens", allows_none=True)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts, each as text or token ids."""
        return prompts_of(self.prompt, param="prompt")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_min_tokens(self.most_tokens)
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequest("'logprob_token_ids' needs 'logprobs'.", param="logprob_token_ids")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("'max_tokens' may be 0 only with 'echo'.", param="max_tokens")
        if len(self.prompts) * (self.n or 1) > MAX_SEQUENCES:
            raise InvalidRequest(
                f"'prompt' times 'n' is more than {MAX_SEQUENCES} sequences.", param="prompt"
            )


class CompletionFormat(OpenAIFormat):
    chunk_kind = "text_completion"
    body_kind = "text_completion"
    constants: ClassVar[dict[str, str]] = {}
    tells_prompt_once = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offsets: dict[int, TextOffset] = defaultdict(TextOffset)
        self._begun: set[int] = set()

    def chunk(self, delta: Delta) -> bytes:
        is_scored = self._logprobs and delta.scored
        text = delta.text
        if not (text or is_scored or delta.finish_reason or self._token_ids):
            return b""
        prompt = b"" if delta.index in self._begun else self._told_prompt(delta)
        self._begun.add(delta.index)
        return b'%s{"index":%d,"text":%s%s' % (
            self._head,
            delta.index,
            encode(text),
            self._end(delta, prompt),
        )

    def _content(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text}

    def _logprobs_of(self, index: int, scored: list[Scored]) -> dict[str, Any]:
        """Returns the log-probabilities of a choice's tokens. Offsets are in characters from the
        beginning of the choice."""
        spelled = [self._spelled[entry.token] for entry in scored]
        offset = self._offsets[index]
        return {
            "tokens": [
                token_name(entry.token, each, as_id=self._tokens_as_ids)
                for entry, each in zip(scored, spelled, strict=True)
            ],
            "token_logprobs": [finite(entry.logprob) for entry in scored],
            "top_logprobs": [self._top(entry) for entry in scored],
            "text_offset": [offset.add(each) for each in spelled],
        }

    def _top(self, entry: Scored) -> dict[str, float | None] | None:
        """Returns log-probabilities of the token itself and of the likeliest tokens, by name.
        Returns None if the token has no log-probability, as at the beginning of a prompt."""
        if entry.logprob is None:
            return None
        ranked = [(entry.token, entry.logprob), *entry.top]
        return {
            token_name(token, self._spelled[token], as_id=self._tokens_as_ids): finite(logprob)
            for token, logprob in ranked
        }


class TextOffset:
    """Counter of the characters before each token of one choice."""

    def __init__(self) -> None:
        self._decoder = UTF8("replace")
        self._num_chars = 0

    def add(self, spelled: bytes) -> int:
        """Adds a token and returns the number of complete characters before it."""
        before = self._num_chars
        self._num_chars += len(self._decoder.decode(spelled))
        return before


class Completions(Dialect[CompletionRequest]):
    id_prefix = "cmpl"

    def read(self, body: CompletionRequest) -> Request:
        return Request(
            **body.neutral_fields(),
            prompts=body.prompts,
            echo=bool(body.echo),
            max_tokens=body.most_tokens,
            num_logprobs=body.logprobs,
        )

    def answer_format(self, body: CompletionRequest, context: AnswerContext) -> CompletionFormat:
        id = f"{self.id_prefix}-{context.request_id}"
        return CompletionFormat(id, body, context.spelled, logprobs=body.logprobs is not None)
