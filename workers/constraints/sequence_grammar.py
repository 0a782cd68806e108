"""Grammar of one sequence. It is advanced by the sequence's tokens on separate threads, never on
the engine thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Lock
from time import thread_time
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from workers.scheduling.constraint import NO_TOKENS

log = logging.getLogger(__name__)

MAX_FORCED = 64
"""Maximum number of forced tokens that are appended at a time. A token is forced if it is the only
token that may follow."""
WAIT_S = 0.004
"""Maximum seconds that a step waits for grammars."""
NUM_QUICK = 2
"""Number of threads that advance grammars that are not known to be slow. While one thread finds out
that a grammar is slow, the other thread advances the others."""
NUM_COMPILING = 2
"""Number of threads that compile grammars. While one thread compiles a slow grammar, the other
thread compiles grammars of other tenants."""
SLOW_S = 0.004
"""Minimum CPU seconds in one step that make a grammar count as slow. From then on, the grammar is
advanced on the thread for slow grammars."""


class CompiledGrammar:
    """Compiled grammar. Its matcher is copied for each sequence that uses the grammar."""

    def __init__(self, matcher: LLMatcher, *, is_slow: bool) -> None:
        """is_slow: whether advancing by one token may take long, or has already taken long."""
        self.matcher = matcher
        self.is_slow = is_slow


class GrammarThreads:
    """Threads of a worker that work on grammars. `NUM_QUICK` threads advance grammars whose tokens
    take microseconds, one thread advances slow grammars, and `NUM_COMPILING` threads compile
    grammars."""

    def __init__(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """on_ready: function that is called on these threads when a grammar has become ready."""
        self.on_ready = on_ready
        self._quick = ThreadPoolExecutor(NUM_QUICK, thread_name_prefix="masks")
        self.slow = ThreadPoolExecutor(1, thread_name_prefix="slow-masks")
        self.compiling = ThreadPoolExecutor(NUM_COMPILING, thread_name_prefix="grammars")
        self._due: list[SequenceGrammar] = []

    def add(self, grammar: SequenceGrammar) -> None:
        """Adds a grammar that the next call of `follow` will advance."""
        self._due.append(grammar)

    def follow(self) -> None:
        """Starts to advance the added grammars by their tokens, and waits briefly. Grammars that
        have not finished after the wait continue during later steps."""
        due, self._due = self._due, []
        started = [self.slow.submit(grammar.go_on) for grammar in due if grammar.is_slow]
        quick = deque(grammar for grammar in due if not grammar.is_slow)
        started += [
            self._quick.submit(_go_on_all, quick) for _ in range(min(NUM_QUICK, len(quick)))
        ]
        wait(started, WAIT_S)

    def close(self) -> None:
        for threads in (self._quick, self.slow, self.compiling):
            threads.shutdown(wait=False, cancel_futures=True)


class SequenceGrammar:
    """Implementation of `Constraint` for the grammar of one sequence. Its state is the position in
    the grammar after the sequence's last token.

    Until the constraint is ready, only a grammar thread changes its mask and failure. Once it is
    ready, only the engine thread uses it.
    """

    banned = NO_TOKENS
    needs_host_token = True

    def __init__(
        self,
        grammar: str,
        generated: list[int],
        tokenizer: LLTokenizer,
        threads: GrammarThreads,
        *,
        forces: bool,
        on_close: Callable[[SequenceGrammar], object],
    ) -> None:
        """generated: tokens of the sequence that another worker generated. forces: whether a token
        that is the only possible continuation is appended without being sampled."""
        self.grammar = grammar
        self.is_ready = False
        self.failure: str | None = None
        self.mask: NDArray[Any] | None = None
        self._tokens = generated
        """Tokens by which the grammar thread will advance the grammar next."""
        self._may_force = forces
        self._forces = False
        self._forced: list[int] = []
        self._lock = Lock()
        """Lock that guards `_forces` and `_forced`. If the grammar thread finds forced tokens only
        after `forced` has returned, these tokens are sampled instead."""
        self._end = tokenizer.eos_token
        self._num_words = -(-tokenizer.vocab_size // 32)
        self._threads = threads
        self._on_close = on_close
        self._compiled: CompiledGrammar | None = None
        self._matcher: LLMatcher | None = None

    @property
    def is_slow(self) -> bool:
        return self._compiled is not None and self._compiled.is_slow

    def advance(self, tokens: list[int]) -> None:
        """Adds generated tokens. The constraint is not ready until the grammar has advanced by
        these tokens. The first call of `forced` after a step advances all grammars that have new
        tokens."""
        self.is_ready, self._tokens, self._forces = False, tokens, self._may_force
        self._threads.add(self)

    def forced(self) -> list[int]:
        self._threads.follow()
        with self._lock:
            self._forces = False
            forced, self._forced = self._forced, []
        return forced

    def close(self) -> None:
        self._on_close(self)

    # The methods below are called on a grammar thread.

    def begin(self, compiled: CompiledGrammar) -> None:
        """Starts from a copy of the compiled grammar and advances it by the tokens so far. Called
        once."""
        self._compiled, self._matcher = compiled, compiled.matcher.deep_copy()
        # A mask is computed before the grammar advances. The work for a mask is limited, so that a
        # bad grammar fails here, instead of blocking other threads while it advances.
        self._fill_mask()
        for token in self._tokens:
            if not self._advance([token]):
                break
        else:
            self._fill_mask()
        self._set_ready()

    def fail(self, failure: str) -> None:
        """Records why no token can be generated."""
        self.failure = failure
        self._set_ready()

    def go_on(self) -> None:
        begun_s = thread_time()
        try:
            self._go_on()
        except BaseException as error:  # llguidance's panics are not derived from Exception
            log.exception("following a grammar failed")
            self.failure = type(error).__name__
        if self._compiled is not None and thread_time() - begun_s >= SLOW_S:
            self._compiled.is_slow = True
        self._set_ready()

    def _go_on(self) -> None:
        assert self._matcher is not None
        if not self._advance(self._tokens):
            return
        forced: list[int] = []
        if self._forces and not self._matcher.is_stopped():
            forced = self._matcher.compute_ff_tokens()[:MAX_FORCED]
        with self._lock:
            if not self._forces:
                forced = []
            elif self._matcher.is_stopped():
                self._forced = [self._end]
                return
            self._forced = forced
        if self._advance(forced):
            self._fill_mask()

    def _set_ready(self) -> None:
        self.is_ready = True
        self._threads.on_ready()

    def _advance(self, tokens: list[int]) -> bool:
        assert self._matcher is not None
        if not self._matcher.consume_tokens(tokens):
            self.failure = self._matcher.get_error()
        return self.failure is None

    def _fill_mask(self) -> None:
        assert self._matcher is not None
        # The matcher's mask may have more 32-bit words than the vocabulary needs.
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        self.mask = mask[: self._num_words]
        if self._matcher.is_error():
            self.failure = self._matcher.get_error()


def _go_on_all(grammars: deque[SequenceGrammar]) -> None:
    """Removes and advances the grammars. Several threads may share the queue."""
    while True:
        try:
            grammar = grammars.popleft()
        except IndexError:
            return
        grammar.go_on()
