"""Translates requests for the relevance of documents to queries: vLLM's POST /v1/score, and POST
/v1/rerank in the form of Jina, Cohere and vLLM."""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from gateway.dialects.dialect import Answer, AnswerContext, BodyFormat, Dialect
from gateway.dialects.embeddings import prompt_usage
from gateway.dialects.openai_fields import Count, InputFields
from gateway.exceptions import InvalidRequest
from gateway.limits.admission import Usage
from gateway.request import INSTRUCTION, Pair, Request
from workers.wire.protocol import OutputKind

MAX_PAIRS = 2048
Texts = str | Annotated[list[str], Meta(min_length=1)]
PAIR_NAMES = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)
"""Pairs of fields that hold the texts to compare, as in vLLM."""
Instruction = Annotated[str, Meta(min_length=1, max_length=4096)]


class ScoreRequest(InputFields, frozen=True, kw_only=True):
    """Body of POST /v1/score. Compares one text with one or many, or two lists of equal length,
    under one pair of names."""

    example: ClassVar[dict[str, Any]] = {
        "model": "support-bot",
        "queries": "Where is my parcel?",
        "documents": ["Parcels take two days.", "We are closed on Sundays."],
    }

    model: Annotated[str, Meta(min_length=1)]
    queries: Texts | None = None
    """Queries, which are compared with `documents` or `items`."""
    documents: Texts | None = None
    items: Texts | None = None
    """Alias of `documents`."""
    data_1: Texts | None = None
    """Alias of `queries`, used with `data_2`."""
    data_2: Texts | None = None
    text_1: Texts | None = None
    """Alias of `queries`, used with `text_2`."""
    text_2: Texts | None = None
    instruction: Instruction | None = None
    """Criterion of relevance. Default: the criterion of Qwen3-Reranker."""
    user: str | None = None
    """Key by which requests are split between a canary's versions. Default: the API key."""

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two fields that hold the texts. Raises InvalidRequest unless exactly one of
        PAIR_NAMES is given."""
        given = {name for pair in PAIR_NAMES for name in pair if getattr(self, name) is not None}
        for pair in PAIR_NAMES:
            if given == set(pair):
                return pair
        choices = ", ".join(f"'{first}' with '{second}'" for first, second in PAIR_NAMES)
        shown = ", ".join(f"'{name}'" for name in sorted(given)) or "none of them"
        missing = [n for pair in PAIR_NAMES if given & {*pair} for n in pair if n not in given]
        raise InvalidRequest(
            f"Give one of {choices}; you gave {shown}.", param=missing[0] if missing else "queries"
        )

    @property
    def pairs(self) -> list[Pair]:
        first, second = self.names
        queries, documents = _texts(getattr(self, first)), _texts(getattr(self, second))
        if len(queries) == 1:
            queries = queries * len(documents)
        if len(queries) != len(documents):
            raise InvalidRequest(
                f"'{first}' must be one text, or as many as '{second}' has.", param=first
            )
        return _pairs(queries, documents, self.instruction, param=second)


def _texts(given: Texts) -> list[str]:
    return [given] if isinstance(given, str) else given


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str


class RerankRequest(InputFields, frozen=True, kw_only=True):
    """Body of POST /v1/rerank."""

    example: ClassVar[dict[str, Any]] = {
        "model": "support-bot",
        "query": "Where is my parcel?",
        "documents": ["Parcels take two days.", "We are closed on Sundays."],
        "top_n": 1,
    }

    model: Annotated[str, Meta(min_length=1)]
    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Count | None = None
    """Maximum documents returned. Default: all."""
    return_documents: bool | None = None
    """Whether the documents' texts are returned too. Default: true."""
    max_tokens_per_doc: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    """Maximum tokens kept from the beginning of each document. 0 keeps all, as the default does."""
    instruction: Instruction | None = None
    user: str | None = None

    @property
    def texts(self) -> list[str]:
        """Texts of the documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]

    @property
    def pairs(self) -> list[Pair]:
        queries = [self.query] * len(self.documents)
        return _pairs(queries, self.texts, self.instruction, param="documents")


def _pairs(
    queries: list[str], documents: list[str], instruction: str | None, *, param: str
) -> list[Pair]:
    if len(documents) > MAX_PAIRS:
        raise InvalidRequest(
            f"At most {MAX_PAIRS} texts are taken in one request; you sent {len(documents)}.",
            param=param,
        )
    return [
        Pair(query, document, instruction or INSTRUCTION)
        for query, document in zip(queries, documents, strict=True)
    ]


def relevance(answer: Answer) -> float:
    """Returns the probability that the model answers `yes` rather than `no`, from 0 to 1."""
    assert answer.vector is not None
    no, yes = np.frombuffer(answer.vector, "<f4").tolist()
    return 1 / (1 + math.exp(min(no - yes, 700.0)))


class ScoreFormat(BodyFormat):
    """Response with scores in the order of the texts."""

    def __init__(self, response_id: str, model: str) -> None:
        """`model` is the name of the model in the request."""
        self._id = response_id
        self._model = model

    async def body(self, answers: list[Answer], usage: Usage) -> list[bytes]:
        body = msgspec.json.encode(
            {
                "id": self._id,
                "object": "list",
                "created": int(time.time()),
                "model": self._model,
                "data": [
                    {"index": each.index, "object": "score", "score": relevance(each)}
                    for each in answers
                ],
                "usage": prompt_usage(usage),
            }
        )
        return [body]


class RerankFormat(BodyFormat):
    """Response with documents by decreasing relevance. Ties are in the order of the request."""

    def __init__(
        self, response_id: str, model: str, texts: list[str] | None, top_n: int | None
    ) -> None:
        """`texts` are the texts of the documents, or None if the response does not show them."""
        self._id = response_id
        self._model = model
        self._texts = texts
        self._top_n = top_n

    async def body(self, answers: list[Answer], usage: Usage) -> list[bytes]:
        scores = [(relevance(answer), answer.index) for answer in answers]
        scores.sort(key=lambda scored: (-scored[0], scored[1]))
        body = msgspec.json.encode(
            {
                "id": self._id,
                "model": self._model,
                "usage": prompt_usage(usage),
                "results": [
                    {"index": index, **self._shown(index), "relevance_score": score}
                    for score, index in scores[: self._top_n]
                ],
            }
        )
        return [body]

    def _shown(self, index: int) -> dict[str, Any]:
        return {} if self._texts is None else {"document": {"text": self._texts[index]}}


class Scores(Dialect[ScoreRequest]):
    id_prefix = "score"

    def read(self, body: ScoreRequest) -> Request:
        return _asked(body, body.pairs, body.names[1])

    def answer_format(self, body: ScoreRequest, context: AnswerContext) -> ScoreFormat:
        return ScoreFormat(f"{self.id_prefix}-{context.request_id}", body.model)


class Reranking(Dialect[RerankRequest]):
    id_prefix = "rerank"

    def read(self, body: RerankRequest) -> Request:
        asked = _asked(body, body.pairs, "documents")
        return msgspec.structs.replace(asked, max_document_tokens=body.max_tokens_per_doc or None)

    def answer_format(self, body: RerankRequest, context: AnswerContext) -> RerankFormat:
        texts = None if body.return_documents is False else body.texts
        return RerankFormat(f"{self.id_prefix}-{context.request_id}", body.model, texts, body.top_n)


def _asked(body: ScoreRequest | RerankRequest, pairs: list[Pair], param: str) -> Request:
    return Request(
        **body.input_fields(),
        model=body.model,
        pairs=pairs,
        prompts_param=param,
        kind=OutputKind.EMBED,
        max_tokens=0,
        user=body.user,
    )
