"""Writes the answers of OpenAI's chat and text completions: chunks, bodies and usage.

A stream has about one chunk per token. Most bytes of a chunk are therefore encoded only once per
response.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import msgspec

from gateway.dialects.dialect import (
    SCORES_AT_ONCE,
    Answer,
    AnswerFormat,
    num_scores,
    slices,
    write_scores,
)
from gateway.dialects.openai_fields import OpenAIRequest
from gateway.dispatch.sequence import Delta, Scored
from gateway.exceptions import to_failure
from gateway.limits.admission import Usage
from gateway.text.detokenizer import TokenBytes
from web.error_answers import error_body

DONE = b"data: [DONE]\n\n"
BARE_END = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]'
LOWEST_LOGPROB = -9999.0
"""Log-probability that replaces minus infinity, which JSON cannot express."""

encode = msgspec.json.encode


class OpenAIFormat(AnswerFormat):
    """Answer to one request for chat or text completions."""

    chunk_kind: ClassVar[str]
    body_kind: ClassVar[str]
    constants: ClassVar[dict[str, str]]
    """Keys of bodies and chunks that have the same value in all answers."""
    tells_prompt_once: ClassVar[bool]
    """Whether the prompt's tokens are written once, next to the choices, not in each choice."""

    def __init__(
        self,
        response_id: str,
        body: OpenAIRequest,
        spelled: TokenBytes,
        *,
        logprobs: bool,
    ) -> None:
        """`spelled` maps token ids to bytes."""
        self._id = response_id
        self._model = body.model
        self._created = int(time.time())
        self._spelled = spelled
        self._logprobs = logprobs
        self._include_usage = body.include_usage
        self._token_ids = bool(body.return_token_ids)
        self._chooses_tokens = bool(body.logprob_token_ids)
        self._tokens_as_ids = bool(body.return_tokens_as_token_ids)
        self._continuous_usage = body.has_continuous_usage
        self._tail = b',"usage":null}\n\n' if body.include_usage else b"}\n\n"
        self._plain_end = BARE_END + self._tail

    @cached_property
    def _head(self) -> bytes:
        head = {
            "id": self._id,
            "object": self.chunk_kind,
            "created": self._created,
            "model": self._model,
            **self.constants,
        }
        return b'data: %s,"choices":[' % encode(head)[:-1]

    def end(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        return b'%s],"usage":%s}\n\n%s' % (self._head, encode(usage_object(usage)), DONE)

    def error_event(self, error: Exception) -> bytes:
        return b"data: %s\n\n" % encode(error_body(to_failure(error)))

    async def body(self, answers: list[Answer], usage: Usage) -> list[bytes]:
        is_large = sum([num_scores(answer.scored) for answer in answers]) > SCORES_AT_ONCE
        logprobs = [
            await self._large_logprobs(answer) if is_large else self._small_logprobs(answer)
            for answer in answers
        ]
        prompts = [await self._prompt(answer) for answer in answers]
        once = prompts[0] if self.tells_prompt_once else {}
        body = encode(
            {
                "id": self._id,
                "object": self.body_kind,
                "created": self._created,
                "model": self._model,
                **self.constants,
                "choices": [
                    {
                        "index": answer.index,
                        **self._content(answer),
                        "logprobs": scored,
                        "finish_reason": answer.finish_reason,
                        "stop_reason": answer.stop,
                        "token_ids": answer.tokens if self._token_ids else None,
                        **({} if self.tells_prompt_once else prompt),
                    }
                    for answer, scored, prompt in zip(answers, logprobs, prompts, strict=True)
                ],
                "usage": usage_object(usage),
                **once,
            }
        )
        return [body]

    def _small_logprobs(self, answer: Answer) -> dict[str, Any] | None:
        return self._logprobs_of(answer.index, answer.scored) if self._logprobs else None

    async def _large_logprobs(self, answer: Answer) -> dict[str, Any] | None:
        """Returns the log-probabilities of a large answer, written in slices."""
        if not self._logprobs or not answer.scored:
            return self._small_logprobs(answer)
        parts: list[dict[str, bytes]] = []
        for piece in slices(answer.scored):
            write = partial(self._written_logprobs, answer.index, piece)
            parts.append(await write_scores(piece, write))
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}

    def _written_logprobs(self, index: int, scored: list[Scored]) -> dict[str, bytes]:
        told = self._logprobs_of(index, scored)
        return {name: encode(value) for name, value in told.items()}

    async def _prompt(self, answer: Answer) -> dict[str, Any]:
        """Returns the prompt's token ids and log-probabilities in vLLM's form, each null unless
        requested. The log-probabilities are written in slices."""
        parts: list[bytes] = []
        for piece in slices(answer.prompt_scored):
            parts.append(encode([self._ranked(entry) for entry in piece]))
            await asyncio.sleep(0)
        return {
            "prompt_logprobs": _joined(parts) if parts else None,
            "prompt_token_ids": answer.prompt if self._token_ids else None,
        }

    def _ranked(self, entry: Scored) -> dict[int, dict[str, Any]] | None:
        """Returns the log-probabilities of a token and of the likeliest tokens, by token id. Only
        the likeliest tokens have a rank. Returns None if the token has no log-probability."""
        if entry.logprob is None:
            return None
        told: dict[int, tuple[float, int | None]] = {entry.token: (entry.logprob, None)}
        for rank, (token, logprob) in enumerate(entry.top, start=1):
            told[token] = logprob, rank
        return {
            token: {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": token_text(self._spelled[token]),
            }
            for token, (logprob, rank) in told.items()
        }

    @abstractmethod
    def _content(self, answer: Answer) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs_of(self, index: int, scored: list[Scored]) -> dict[str, Any]: ...

    def _end(self, delta: Delta, told: bytes = b"") -> bytes:
        """Returns the bytes of a chunk after its text. `told` is the JSON of further members of the
        choice, and begins with a comma unless it is empty."""
        scored = delta.scored if self._logprobs else None
        if not scored and delta.finish_reason is None and not self._token_ids:
            return self._bare_end(delta)
        return b',"logprobs":%s,"finish_reason":%s,"stop_reason":%s%s%s}]%s' % (
            encode(self._logprobs_of(delta.index, scored) if scored else None),
            encode(delta.finish_reason),
            encode(delta.stop),
            b',"token_ids":%s' % encode(delta.tokens) if self._token_ids else b"",
            told,
            self._tail_of(delta),
        )

    def _bare_end(self, delta: Delta) -> bytes:
        """Returns the bytes after the text of a chunk that has only text."""
        return BARE_END + self._tail_of(delta) if self._continuous_usage else self._plain_end

    def _tail_of(self, delta: Delta) -> bytes:
        if not self._continuous_usage:
            return self._tail
        usage = Usage(len(delta.prompt), delta.num_tokens, thought_tokens=delta.num_thought_tokens)
        return b',"usage":%s}\n\n' % encode(usage_object(usage))

    def _told_prompt(self, delta: Delta) -> bytes:
        """Returns the JSON member with the prompt's token ids, for a first chunk. Returns empty
        bytes if token ids are not requested."""
        return b',"prompt_token_ids":%s' % encode(delta.prompt) if self._token_ids else b""


def token_text(spelled: bytes) -> str:
    """Returns the text of a token. A token that is not UTF-8 is written as `bytes:\\xe2\\x82`."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def token_name(token: int, spelled: bytes, *, as_id: bool) -> str:
    """Returns the name of a token in log-probabilities: its text, or its id."""
    return f"token_id:{token}" if as_id else token_text(spelled)


def scored_token(
    spelled: TokenBytes, entry: Scored, *, as_ids: bool = False, includes_own: bool = False
) -> dict[str, Any]:
    """Returns the log-probabilities of a token and of the likeliest tokens, in the form of chats
    and Responses. If `as_ids` is true, tokens are named by their ids. If `includes_own` is true,
    the token itself precedes the likeliest tokens, unless it is one of them."""

    def shown(token: int, logprob: float | None) -> dict[str, Any]:
        text = spelled[token]
        name = token_name(token, text, as_id=as_ids)
        return {"token": name, "logprob": finite(logprob), "bytes": list(text)}

    ranked = entry.top
    if includes_own and all(token != entry.token for token, _ in ranked):
        ranked = [(entry.token, entry.logprob), *ranked]
    top = [shown(token, logprob) for token, logprob in ranked]
    return {**shown(entry.token, entry.logprob), "top_logprobs": top}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.thought_tokens},
    }


def _joined(arrays: Sequence[bytes]) -> msgspec.Raw:
    """Joins the JSON values of all slices. Arrays are joined into one array. Any other value is the
    same in each slice, and is returned."""
    if not arrays[0].startswith(b"["):
        return msgspec.Raw(arrays[0])
    return msgspec.Raw(b"[%s]" % b",".join([array[1:-1] for array in arrays]))


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)
