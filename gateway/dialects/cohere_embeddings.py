"""Translates Cohere's embeddings: POST /v2/embed."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from gateway.dialects.dialect import Answer, AnswerContext, BodyFormat, Dialect
from gateway.dialects.embeddings import MAX_INPUTS, unit_vectors
from gateway.dialects.generation_fields import Priority
from gateway.dialects.history import ConversationReader, Place, is_absent
from gateway.dialects.openai_fields import Count
from gateway.exceptions import InvalidRequest
from gateway.limits.admission import Usage
from gateway.request import Request, Truncation
from workers.wire.protocol import OutputKind

Vector = NDArray[np.float32]
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
SIDES: Mapping[str, Literal["left", "right"]] = {"START": "left", "END": "right"}
"""Side at which a long text is cut, by the value of `truncate`."""
OFFSET = 128
"""Difference between an unsigned byte and its signed form, as in Cohere's API."""


class EmbedInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text in parts."""

    content: Annotated[list[dict[str, Any]], Meta(min_length=1)]


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v2/embed."""

    example: ClassVar[dict[str, Any]] = {
        "model": "support-bot",
        "input_type": "search_query",
        "texts": ["Where is my parcel?", "My parcel is late."],
        "embedding_types": ["float"],
    }

    model: Annotated[str, Meta(min_length=1)]
    texts: Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)] | None = None
    inputs: Annotated[list[EmbedInput], Meta(min_length=1, max_length=MAX_INPUTS)] | None = None
    """Alternative to `texts`. Each input is a list of parts, which must be text."""
    images: Any = None
    """Refused, because no model here reads images."""
    input_type: (
        Literal["search_document", "search_query", "classification", "clustering"] | None
    ) = None
    """Dropped, because instructions for a model belong in the text itself."""
    embedding_types: Annotated[list[EmbeddingType], Meta(max_length=6)] | None = None
    """Forms in which each vector is written. Default: `float`."""
    output_dimension: Count | None = None
    """Number of leading dimensions kept of each vector, which is then scaled to length 1."""
    truncate: Literal["NONE", "START", "END"] | None = None
    """Side at which a long text is cut. Default: `END`. `NONE` refuses long texts."""
    max_tokens: Count | None = None
    """Maximum tokens kept of each text. Default: the context's length. Not allowed with `NONE`."""
    priority: Priority | None = None
    user: str | None = None
    """Key by which requests are split between a canary's versions. Default: the API key."""

    def __post_init__(self) -> None:
        if not is_absent(self.images):
            raise InvalidRequest(
                "Unsupported content in 'images'. Only text is read.",
                param="images",
                code="unsupported_content",
            )
        if (self.texts is None) == (self.inputs is None):
            raise InvalidRequest("Give either 'texts' or 'inputs'.", param="texts")
        if self.truncate == "NONE" and self.max_tokens is not None:
            raise InvalidRequest(
                "'max_tokens' cuts texts, which 'truncate' of \"NONE\" forbids; leave one out.",
                param="max_tokens",
            )

    def read_texts(self) -> list[str]:
        """Returns the text of each input. Raises InvalidRequest for content that is not text."""
        if self.texts is not None:
            return self.texts
        reader = ConversationReader()
        return [
            reader.text(given.content, Place(number, Place("inputs"), is_typed=True))
            for number, given in enumerate(self.inputs or [])
        ]

    @property
    def forms(self) -> list[EmbeddingType]:
        """Forms in which each vector is written, each once."""
        return list(dict.fromkeys(self.embedding_types or ["float"]))

    @property
    def truncation(self) -> Truncation | None:
        """Truncation of texts that are too long. None if such texts are refused."""
        side = SIDES.get(self.truncate or "END")
        if side is None:
            return None
        return Truncation(self.max_tokens or -1, side, param="max_tokens")


def _bytes_of(vector: Vector) -> NDArray[np.int8]:
    """Returns the numbers as bytes, scaled so that the largest magnitude in the vector is 127. This
    preserves the cosine of two vectors approximately."""
    largest = np.abs(vector).max(initial=0)
    scaled = np.divide(vector, largest, out=np.zeros_like(vector), where=largest > 0)
    return np.rint(scaled * 127).astype(np.int8)


def _bits_of(vector: Vector) -> NDArray[np.uint8]:
    """Returns the signs of the numbers, eight in a byte. Zero bits pad the last byte."""
    return np.packbits(vector > 0)


WRITERS: Mapping[str, Callable[[Vector], Any]] = {
    "float": lambda vector: vector.tolist(),
    "int8": lambda vector: _bytes_of(vector).tolist(),
    "uint8": lambda vector: (_bytes_of(vector).astype(np.int16) + OFFSET).tolist(),
    "binary": lambda vector: (_bits_of(vector).astype(np.int16) - OFFSET).tolist(),
    "ubinary": lambda vector: _bits_of(vector).tolist(),
    "base64": lambda vector: base64.b64encode(vector.tobytes()).decode(),
}
"""Functions that write a vector, by embedding type."""


class EmbedFormat(BodyFormat):
    """Response with vectors of length 1 for each embedding type, in the order of the texts."""

    def __init__(self, response_id: str, body: EmbedRequest) -> None:
        self._id = response_id
        self._body = body

    async def body(self, answers: list[Answer], usage: Usage) -> list[bytes]:
        forms = self._body.forms
        written: dict[str, list[bytes]] = {form: [] for form in forms}
        dimensions = self._body.output_dimension
        async for _, vector in unit_vectors(answers, dimensions, len(forms)):
            for form, pieces in written.items():
                pieces.append(b"," if pieces else b'"%s":[' % form.encode())
                pieces.append(msgspec.json.encode(WRITERS[form](vector)))
        pieces = [b'{"id":%s,"embeddings":{' % msgspec.json.encode(self._id)]
        for number, vectors in enumerate(written.values(), start=1):
            pieces += [*vectors, b"]," if number < len(forms) else b"]},"]
        told = {
            "texts": self._body.read_texts(),
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": usage.prompt_tokens, "image_tokens": 0},
            },
            "response_type": "embeddings_by_type",
        }
        return [*pieces, msgspec.json.encode(told)[1:]]


class CohereEmbeddings(Dialect[EmbedRequest]):
    id_prefix = "embd"

    def read(self, body: EmbedRequest) -> Request:
        return Request(
            model=body.model,
            prompts=list(body.read_texts()),
            prompts_param="inputs" if body.texts is None else "texts",
            truncation=body.truncation,
            priority=body.priority or 0,
            kind=OutputKind.EMBED,
            dimensions=body.output_dimension,
            dimensions_param="output_dimension",
            num_vector_forms=len(body.forms),
            max_tokens=0,
            user=body.user,
            dropped=() if body.input_type is None else ("input_type",),
        )

    def answer_format(self, body: EmbedRequest, context: AnswerContext) -> EmbedFormat:
        return EmbedFormat(f"{self.id_prefix}-{context.request_id}", body)
