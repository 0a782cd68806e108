"""Compiles the grammars of one model's constrained sequences on separate threads."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from functools import partial
from pathlib import Path
from threading import Lock

from llguidance import LLMatcher

from workers.constraints.sequence_grammar import (
    NUM_COMPILING,
    CompiledGrammar,
    GrammarThreads,
    SequenceGrammar,
)
from workers.wire import grammars
from workers.wire.grammar_checks import GrammarChecks
from workers.wire.recent_refusals import RecentRefusals

log = logging.getLogger(__name__)

MAX_CACHED = 256
MAX_CACHED_BYTES = 16 << 20
"""Maximum total length, in characters, of the texts of all grammars whose compiled form is
cached."""


class Grammars:
    """Compiler and cache of one base model's grammars.

    Each grammar is compiled in a sandbox first, then in this process, and cached. Copying a cached
    grammar for a sequence takes microseconds. Tenants take turns, and at most one grammar of a
    tenant is compiled at a time.
    """

    def __init__(
        self,
        tokenizer: Path,
        vocab_size: int,
        end_tokens: frozenset[int],
        threads: GrammarThreads,
    ) -> None:
        """tokenizer: path of the model's tokenizer.json. vocab_size: number of columns of the
        model's logits. Raises ValueError if the tokenizer cannot be used with grammars."""
        ends = sorted(end_tokens)
        self._tokenizer = grammars.read_tokenizer(str(tokenizer), vocab_size, ends)
        self._checks = GrammarChecks(str(tokenizer.absolute()), str(vocab_size), *map(str, ends))
        self._refusals: RecentRefusals[str] = RecentRefusals()
        self._threads = threads
        self._lock = Lock()
        """Lock that guards all attributes that are defined after it."""
        self._waiting: OrderedDict[str, dict[SequenceGrammar, str]] = OrderedDict()
        """Request id of each queued grammar, by tenant and grammar. The tenant whose grammar is
        compiled next is first."""
        self._compiling: set[str] = set()
        """Tenants for which a thread is compiling a grammar."""
        self._num_submitted = 0
        """Number of calls of `_prepare_next` that have been submitted and have not finished."""
        self._compiled: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        """Compiled grammars by digest, the least recently used first."""
        self._sizes: dict[bytes, int] = {}

    def open(
        self,
        grammar: str,
        tenant: str,
        request_id: str,
        generated: list[int],
        *,
        forces: bool = True,
    ) -> SequenceGrammar:
        """Queues a sequence's grammar for compilation and returns it. The grammar becomes ready
        later, unless it is closed first."""
        opened = SequenceGrammar(
            *(grammar, generated, self._tokenizer, self._threads),
            forces=forces,
            on_close=partial(self._withdraw, tenant),
        )
        with self._lock:
            self._waiting.setdefault(tenant, {})[opened] = request_id
            if self._num_submitted < NUM_COMPILING:
                self._submit()
        return opened

    def close(self) -> None:
        self._checks.close()

    @property
    def num_waiting(self) -> int:
        """Number of queued grammars."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def _withdraw(self, tenant: str, opened: SequenceGrammar) -> None:
        """Removes a grammar from the queue, if it is still queued, because its sequence has
        ended."""
        with self._lock:
            queue = self._waiting.get(tenant, {})
            queue.pop(opened, None)
            if not queue:
                self._waiting.pop(tenant, None)

    def _submit(self) -> None:
        """Submits one more call of `_prepare_next` to the threads. Called with the lock held."""
        self._num_submitted += 1
        self._threads.compiling.submit(self._prepare_next)

    def _prepare_next(self) -> None:
        """Compiles the first queued grammar of the next tenant. Skips tenants for which another
        thread is compiling a grammar."""
        with self._lock:
            tenant = next((each for each in self._waiting if each not in self._compiling), None)
            if tenant is None:
                self._num_submitted -= 1
                return
            opened = next(iter(self._waiting[tenant]))
            request_id = self._waiting[tenant].pop(opened)
            if self._waiting[tenant]:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            self._compiling.add(tenant)
        try:
            self._prepare(opened, tenant, request_id)
        finally:
            with self._lock:
                self._compiling.remove(tenant)
                self._num_submitted -= 1
                # Another call of `_prepare_next` may have skipped this tenant while this thread was
                # compiling, so the tenant's next grammar needs a new call.
                if self._waiting:
                    self._submit()

    def _prepare(self, opened: SequenceGrammar, tenant: str, request_id: str) -> None:
        key = hashlib.sha256(opened.grammar.encode()).digest()
        try:
            compiled = self._find(key) or self._refusals.find(key)
            if compiled is None:
                # Logged so that a grammar that crashes the process can be traced to its request.
                log.info(
                    "compiling a grammar of %d characters for request %s of tenant %s",
                    *(len(opened.grammar), request_id, tenant),
                )
                compiled = self._compile(key, opened.grammar)
            if isinstance(compiled, str):
                opened.fail(compiled)
            else:
                opened.begin(compiled)
        except BaseException as error:  # llguidance's panics are not derived from Exception
            log.exception("compiling a grammar failed")
            opened.fail(type(error).__name__)

    def _find(self, key: bytes) -> CompiledGrammar | None:
        with self._lock:
            if (compiled := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
        return compiled

    def _compile(self, key: bytes, grammar: str) -> CompiledGrammar | str:
        """Returns the compiled grammar, or the reason why the grammar is refused."""
        if (reason := self._checks.refusal(grammar)) is not None:
            self._refusals.remember(key, reason)
            return reason
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=grammars.limits())
        if matcher.is_error():
            return matcher.get_error()
        compiled = CompiledGrammar(matcher, is_slow=grammars.is_lark(grammar))
        with self._lock:
            self._compiled[key], self._sizes[key] = compiled, len(grammar)
            while len(self._sizes) > MAX_CACHED or sum(self._sizes.values()) > MAX_CACHED_BYTES:
                oldest, _ = self._compiled.popitem(last=False)
                del self._sizes[oldest]
        return compiled
