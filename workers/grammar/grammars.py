"""The grammars that constrained sequences of one model generate by, compiled beside its engine."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict, deque
from pathlib import Path
from threading import Lock

from llguidance import LLMatcher, LLTokenizer

from workers.grammar.sequence_grammar import CompiledGrammar, GrammarThreads, SequenceGrammar
from workers.wire import grammars

log = logging.getLogger(__name__)

MAX_CACHED = 256
MAX_CACHED_BYTES = 16 << 20
"""Length of the texts of compiled grammars that are kept, in characters together."""


class Grammars:
    """The grammars of one base model.

    Each is compiled once and kept while it is used; a copy for a sequence takes microseconds.
    Tenants' grammars are compiled in turn, one of each at a time.
    """

    def __init__(
        self,
        tokenizer: Path,
        vocab_size: int,
        end_tokens: frozenset[int],
        threads: GrammarThreads,
    ) -> None:
        """tokenizer: the model's tokenizer.json. vocab_size: columns of its logits."""
        self._tokenizer = LLTokenizer(
            str(tokenizer), n_vocab=vocab_size, eos_token=sorted(end_tokens) or None
        )
        self._threads = threads
        self._lock = Lock()
        self._waiting: OrderedDict[str, deque[SequenceGrammar]] = OrderedDict()
        """By tenant, the next in turn first."""
        self._compiled: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        """By digest, the one longest unused first. Of the compiling thread, as the next two."""
        self._sizes: dict[bytes, int] = {}

    def open(self, grammar: str, tenant: str, generated: list[int]) -> SequenceGrammar:
        """A sequence's grammar, which is ready some time later."""
        opened = SequenceGrammar(grammar, generated, self._tokenizer, self._threads)
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(opened)
        self._threads.slow.submit(self._prepare_next)
        return opened

    def follow(self) -> None:
        """Follows the new tokens of a step's sequences. Those of its grammars that are not ready
        then are left out of the next step."""
        self._threads.follow()

    def _prepare_next(self) -> None:
        with self._lock:
            tenant, waiting = self._waiting.popitem(last=False)
            opened = waiting.popleft()
            if waiting:
                self._waiting[tenant] = waiting
        try:
            compiled = self._compile(opened.grammar)
            if compiled.matcher.is_error():
                opened.fail(compiled.matcher.get_error())
            else:
                opened.begin(compiled)
        except Exception as error:
            log.exception("a grammar could not be compiled")
            opened.fail(type(error).__name__)

    def _compile(self, grammar: str) -> CompiledGrammar:
        key = hashlib.sha256(grammar.encode()).digest()
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = CompiledGrammar(
                LLMatcher(self._tokenizer, grammar, log_level=0, limits=grammars.limits()),
                is_slow=grammars.is_lark(grammar),
            )
            if compiled.matcher.is_error():
                return compiled
            self._compiled[key], self._sizes[key] = compiled, len(grammar)
            while len(self._sizes) > MAX_CACHED or sum(self._sizes.values()) > MAX_CACHED_BYTES:
                oldest, _ = self._compiled.popitem(last=False)
                del self._sizes[oldest]
        else:
            self._compiled.move_to_end(key)
        return compiled
