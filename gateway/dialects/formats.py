"""The bytes of answers: OpenAI's chunks and bodies for chat and text completions.

A chunk is put together from parts prepared once per response, since it is made for every token.
"""

from __future__ import annotations

import asyncio
import codecs
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from gateway.dispatch.choice import Delta, Scored
from gateway.limits.admission import Usage
from gateway.text.detokenizer import TokenBytes

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
SCORED_AT_ONCE = 192
"""Tokens whose log-probabilities are written before the loop goes on with others: with 20 others
each it takes about 10 ms."""
LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""

encode = msgspec.json.encode
UTF8 = codecs.getincrementaldecoder("utf-8")


class Answer(msgspec.Struct):
    """A choice's deltas, gathered."""

    index: int
    pieces: list[str] = []
    scored: list[Scored] = []
    tokens: list[int] = []
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.pieces.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.scored.extend(delta.scored)
        self.finish_reason = delta.finish_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class ResponseIdentity(msgspec.Struct, frozen=True):
    """What every chunk of a response repeats."""

    id: str
    created: int
    model: str


class Format(ABC):
    """One dialect's answers to one request."""

    chunk_kind: ClassVar[str]
    body_kind: ClassVar[str]

    def __init__(
        self,
        identity: ResponseIdentity,
        spelled: TokenBytes,
        *,
        logprobs: bool,
        include_usage: bool = False,
        token_ids: bool = False,
    ) -> None:
        self._identity = identity
        self._spelled = spelled
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._plain_end = b',"logprobs":null,"finish_reason":null}]' + self._tail

    @cached_property
    def _head(self) -> bytes:
        return b'data: {"id":%s,"object":%s,"created":%d,"model":%s,"choices":[' % (
            encode(self._identity.id),
            encode(self.chunk_kind),
            self._identity.created,
            encode(self._identity.model),
        )

    @abstractmethod
    def chunk(self, delta: Delta) -> bytes:
        """Server-sent events for a delta; none if it has nothing to show."""

    def usage_chunk(self, usage: Usage) -> bytes:
        return b'%s],"usage":%s}\n\n' % (self._head, encode(usage_object(usage)))

    async def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """The whole answer as one JSON object. While a large one is made, the loop goes on."""
        is_large = sum([len(answer.scored) for answer in answers]) > SCORED_AT_ONCE
        logprobs = [
            await self._large_logprobs(answer) if is_large else self._small_logprobs(answer)
            for answer in answers
        ]
        return encode(
            {
                "id": self._identity.id,
                "object": self.body_kind,
                "created": self._identity.created,
                "model": self._identity.model,
                "choices": [
                    {
                        "index": answer.index,
                        **self._content(answer.text),
                        "logprobs": scored,
                        "finish_reason": answer.finish_reason,
                        **({"token_ids": answer.tokens} if self._token_ids else {}),
                    }
                    for answer, scored in zip(answers, logprobs, strict=True)
                ],
                "usage": usage_object(usage),
            }
        )

    def _small_logprobs(self, answer: Answer) -> dict[str, Any] | None:
        return self._logprobs_of(answer.index, answer.scored) if self._logprobs else None

    async def _large_logprobs(self, answer: Answer) -> dict[str, Any] | None:
        """The same, written some tokens at a time."""
        if not self._logprobs or not answer.scored:
            return self._small_logprobs(answer)
        parts: list[dict[str, bytes]] = []
        for piece in slices(answer.scored):
            part = self._logprobs_of(answer.index, piece)
            parts.append({name: encode(value) for name, value in part.items()})
            await asyncio.sleep(0)
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs_of(self, index: int, scored: list[Scored]) -> dict[str, Any]: ...

    def _end(self, delta: Delta) -> bytes:
        """The rest of a chunk after its text."""
        scored = delta.scored if self._logprobs else None
        if not scored and delta.finish_reason is None and not self._token_ids:
            return self._plain_end
        return b',"logprobs":%s,"finish_reason":%s%s}]%s' % (
            encode(self._logprobs_of(delta.index, scored) if scored else None),
            encode(delta.finish_reason),
            b',"token_ids":%s' % encode(delta.tokens) if self._token_ids else b"",
            self._tail,
        )


class ChatFormat(Format):
    chunk_kind = "chat.completion.chunk"
    body_kind = "chat.completion"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begun: set[int] = set()

    def chunk(self, delta: Delta) -> bytes:
        """A choice's first chunk says the role."""
        role = b""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            role = b'%s{"index":%d,"delta":{"role":"assistant","content":""}%s' % (
                self._head,
                delta.index,
                self._plain_end,
            )
        if not (delta.text or delta.scored or delta.finish_reason or self._token_ids):
            return role
        return b'%s%s{"index":%d,"delta":{"content":%s}%s' % (
            role,
            self._head,
            delta.index,
            encode(delta.text),
            self._end(delta),
        )

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs_of(self, index: int, scored: list[Scored]) -> dict[str, Any]:
        content = [
            {
                **self._token(entry.token, entry.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in entry.top],
            }
            for entry in scored
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        spelled = self._spelled[token]
        return {"token": token_text(spelled), "logprob": finite(logprob), "bytes": list(spelled)}


class CompletionFormat(Format):
    chunk_kind = "text_completion"
    body_kind = "text_completion"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offsets: dict[int, TextOffset] = defaultdict(TextOffset)

    def chunk(self, delta: Delta) -> bytes:
        is_scored = self._logprobs and delta.scored
        if not (delta.text or is_scored or delta.finish_reason or self._token_ids):
            return b""
        return b'%s{"index":%d,"text":%s%s' % (
            self._head,
            delta.index,
            encode(delta.text),
            self._end(delta),
        )

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs_of(self, index: int, scored: list[Scored]) -> dict[str, Any]:
        """Offsets are of the character that a token begins or goes on with, over the whole
        choice."""
        spelled = [self._spelled[entry.token] for entry in scored]
        offset = self._offsets[index]
        return {
            "tokens": list(map(token_text, spelled)),
            "token_logprobs": [finite(entry.logprob) for entry in scored],
            "top_logprobs": [self._top(entry) for entry in scored],
            "text_offset": [offset.add(each) for each in spelled],
        }

    def _top(self, entry: Scored) -> dict[str, float | None] | None:
        """The likeliest, and the token itself, as OpenAI has it."""
        if entry.logprob is None:
            return None
        ranked = [*entry.top, (entry.token, entry.logprob)]
        return {token_text(self._spelled[token]): finite(logprob) for token, logprob in ranked}


class TextOffset:
    """Of the tokens of one choice."""

    def __init__(self) -> None:
        self._decoder = UTF8("replace")
        self._num_chars = 0

    def add(self, spelled: bytes) -> int:
        """Characters that are whole before this token."""
        before = self._num_chars
        self._num_chars += len(self._decoder.decode(spelled))
        return before


def token_text(spelled: bytes) -> str:
    """A token by itself; parts of characters are written as OpenAI does, `bytes:\\xe2\\x82`."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def event(data: object) -> bytes:
    return b"data: %s\n\n" % encode(data)


def slices(scored: Sequence[Scored]) -> Iterator[list[Scored]]:
    """Scored tokens, as many at a time as are written at once."""
    for start in range(0, len(scored), SCORED_AT_ONCE):
        yield list(scored[start : start + SCORED_AT_ONCE])


def split(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """The same deltas, each with as many scored tokens as are written at once: the first part has
    the text, the last the end."""
    for delta in deltas:
        if len(delta.scored) <= SCORED_AT_ONCE:
            yield delta
            continue
        *pieces, last = slices(delta.scored)
        text, tokens = delta.text, delta.tokens
        for piece in pieces:
            yield Delta(delta.index, text, piece, None, tokens)
            text, tokens = "", []
        yield Delta(delta.index, text, last, delta.finish_reason, tokens)


def join_chunks(format: Format, deltas: Iterable[Delta]) -> bytes:
    return b"".join([format.chunk(delta) for delta in deltas])


def _joined(arrays: Sequence[bytes]) -> msgspec.Raw:
    """JSON arrays as one; what is no array is the same in all."""
    if not arrays[0].startswith(b"["):
        return msgspec.Raw(arrays[0])
    return msgspec.Raw(b"[%s]" % b",".join([array[1:-1] for array in arrays]))


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)
