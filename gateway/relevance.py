"""Defines the question that a causal reranker answers with yes or no, in the wording of
Qwen3-Reranker."""

from __future__ import annotations

import msgspec

from gateway.conversation import Message

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
VERDICTS = ("no", "yes")
"""Possible answers, in the order of their logits in the vector of a pair."""


class Pair(msgspec.Struct, frozen=True):
    """Query, and a document whose relevance to the query is judged."""

    query: str
    document: str
    instruction: str = INSTRUCTION
    """Criterion of relevance."""

    @property
    def num_chars(self) -> int:
        """Number of characters of query, document and instruction."""
        return len(self.query) + len(self.document) + len(self.instruction)

    def with_document(self, document: str) -> Pair:
        """Returns the pair with another document, which was shortened. Removes the replacement
        characters that are left at its ends where a character was cut in two."""
        return msgspec.structs.replace(self, document=document.strip("\ufffd"))

    def messages(self) -> list[Message]:
        """Returns the question as a conversation. The document comes last, so that all documents of
        a query share a prefix."""
        asked = (
            f"<Instruct>: {self.instruction}\n<Query>: {self.query}\n<Document>: {self.document}"
        )
        return [Message("system", JUDGE), Message("user", asked)]
