"""Translates OpenAI's embeddings: POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Iterable
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from gateway.dialects.chat_messages import Messages, check_end, neutral_messages
from gateway.dialects.dialect import Answer, AnswerContext, BodyFormat, Dialect
from gateway.dialects.generation_fields import TokenId
from gateway.dialects.history import ConversationReader
from gateway.dialects.openai_fields import Count, InputFields, TokenIds, prompts_of
from gateway.exceptions import InvalidRequest
from gateway.limits.admission import Usage
from gateway.limits.bounds import MAX_TOKEN_IDS
from gateway.request import Request
from workers.wire.protocol import OutputKind

MAX_INPUTS = 2048
"""Maximum number of inputs in a request, as in OpenAI's API."""
NUMBERS_AT_ONCE = 1 << 15
"""Numbers written before the event loop runs other tasks. Writing them takes about 5 ms."""


class EmbeddingRequest(InputFields, frozen=True, kw_only=True):
    """Body of POST /v1/embeddings. `null` always means absent."""

    example: ClassVar[dict[str, Any]] = {
        "model": "support-bot",
        "input": ["Where is my parcel?", "My parcel is late."],
    }

    model: Annotated[str, Meta(min_length=1)]
    input: (
        str
        | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_TOKEN_IDS)]
        | None
    ) = None
    messages: Messages | None = None
    """Alternative to `input`. The answer has one vector, of the conversation's rendered prompt."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of an answer. Default: false."""
    continue_final_message: bool | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    """Number of leading dimensions kept of each vector, which is then scaled to length 1."""
    user: str | None = None
    """Key by which requests are split between a canary's versions. Default: the API key."""

    @property
    def prompts(self) -> list[str | list[int]]:
        """Inputs, each as text or token ids."""
        return [] if self.input is None else prompts_of(self.input, param="input")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.input is None) == (self.messages is None):
            raise InvalidRequest("Give either 'input' or 'messages'.", param="input")
        check_end(self.continue_final_message, self.add_generation_prompt)
        if len(self.prompts) > MAX_INPUTS:
            raise InvalidRequest(
                f"At most {MAX_INPUTS} inputs are taken in one request; you sent "
                f"{len(self.prompts)}.",
                param="input",
            )


class EmbeddingFormat(BodyFormat):
    """Response with vectors of length 1, in the order of the inputs."""

    def __init__(
        self, response_id: str, model: str, dimensions: int | None, *, is_base64: bool
    ) -> None:
        """`model` is the name of the model in the request. `dimensions` is None to keep all."""
        self._id = response_id
        self._model = model
        self._dimensions = dimensions
        self._is_base64 = is_base64

    async def body(self, answers: list[Answer], usage: Usage) -> list[bytes]:
        pieces = [b'{"object":"list","data":[']
        async for index, vector in unit_vectors(answers, self._dimensions):
            entry = {"object": "embedding", "index": index, "embedding": self._shown(vector)}
            pieces.append(b"," if index else b"")
            pieces.append(msgspec.json.encode(entry))
        told = {
            "id": self._id,
            "created": int(time.time()),
            "model": self._model,
            "usage": prompt_usage(usage),
        }
        return [*pieces, b"],", msgspec.json.encode(told)[1:]]

    def _shown(self, vector: NDArray[np.float32]) -> str | list[float]:
        if self._is_base64:
            return base64.b64encode(vector.tobytes()).decode()
        return vector.tolist()


def prompt_usage(usage: Usage) -> dict[str, int]:
    """Returns the usage of a request that generates no tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": 0,
        "total_tokens": usage.prompt_tokens,
    }


async def unit_vectors(
    answers: Iterable[Answer], dimensions: int | None, num_forms: int = 1
) -> AsyncIterator[tuple[int, NDArray[np.float32]]]:
    """Yields the index of each answer, and its vector's first `dimensions` numbers, scaled to
    length 1 unless all are zero. Lets the event loop run other tasks after `NUMBERS_AT_ONCE`
    numbers. The caller writes each number in `num_forms` forms, and each form counts."""
    num_written = 0
    for answer in answers:
        assert answer.vector is not None
        vector: NDArray[np.float32] = np.frombuffer(answer.vector, "<f4")[:dimensions]
        length = np.linalg.norm(vector).astype(np.float32)
        yield answer.index, np.divide(vector, length, out=np.zeros_like(vector), where=length > 0)
        num_written += len(vector) * num_forms
        if num_written >= NUMBERS_AT_ONCE:
            num_written = 0
            await asyncio.sleep(0)


class Embeddings(Dialect[EmbeddingRequest]):
    id_prefix = "embd"

    def read(self, body: EmbeddingRequest) -> Request:
        reader, messages = ConversationReader(), None
        if body.messages is not None:
            messages = neutral_messages(body.messages, reader)
        return Request(
            **body.input_fields(),
            model=body.model,
            prompts=body.prompts,
            prompts_param="input" if messages is None else "messages",
            messages=messages,
            add_generation_prompt=bool(body.add_generation_prompt),
            continue_final_message=bool(body.continue_final_message),
            template_arguments=body.chat_template_kwargs or {},
            dropped=reader.dropped,
            kind=OutputKind.EMBED,
            dimensions=body.dimensions,
            max_tokens=0,
            user=body.user,
        )

    def answer_format(self, body: EmbeddingRequest, context: AnswerContext) -> EmbeddingFormat:
        return EmbeddingFormat(
            f"{self.id_prefix}-{context.request_id}",
            body.model,
            body.dimensions,
            is_base64=body.encoding_format == "base64",
        )
