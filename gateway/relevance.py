"""Question that a causal reranker answers with yes or no, in the words of Qwen3-Reranker."""

from __future__ import annotations

import msgspec

from gateway.messages import Message

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
VERDICTS = ("no", "yes")
"""Answers, in the order of their logits."""


class Pair(msgspec.Struct, frozen=True):
    """Query and document, whose relevance to it is judged."""

    query: str
    document: str
    instruction: str = INSTRUCTION
    """Criterion of relevance."""

    @property
    def num_chars(self) -> int:
        """Number of characters of the caller's texts."""
        return len(self.query) + len(self.document) + len(self.instruction)

    def with_document(self, document: str) -> Pair:
        """Returns the pair with a shorter document, without a character that was cut in two."""
        return msgspec.structs.replace(self, document=document.strip("\ufffd"))

    def messages(self) -> list[Message]:
        """Returns the question as a conversation. The document comes last, so that all documents of
        a query share a prefix."""
        asked = (
            f"<Instruct>: {self.instruction}\n<Query>: {self.query}\n<Document>: {self.document}"
        )
        return [Message("system", JUDGE), Message("user", asked)]
