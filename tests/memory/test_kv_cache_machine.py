"""Any order of what sequences do to a KV cache keeps pages, prefixes and reference counts right."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memory.arena import Arena
from memory.block_table import BlockTable
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS, PageHasher
from memory.runs import UNIT_BYTES, AdapterRuns, Run

PAGE_BYTES = UNIT_BYTES // 4
HASHERS = [PageHasher(model="m", domain=domain) for domain in ("acme", "globex")]


class _Sequence:
    """A table and the tokens an engine would have behind it."""

    def __init__(self, kv: KVCache, domain: int, tokens: list[int]) -> None:
        self.table = BlockTable(kv)
        self.domain = domain
        self.tokens = tokens
        self.num_computed = 0
        self.keys: list[bytes] = []

    def content(self, index: int) -> tuple[int, tuple[int, ...]]:
        return self.domain, tuple(self.tokens[: (index + 1) * PAGE_TOKENS])


class Sequences(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(8 * UNIT_BYTES, UNIT_BYTES)
        self.kv = KVCache(self.arena, "m", PAGE_BYTES)
        self.adapter_runs = AdapterRuns(self.arena)
        self.runs: list[Run] = []
        self.sequences: list[_Sequence] = []
        self.written: dict[int, tuple[int, tuple[int, ...]]] = {}

    @rule(
        domain=st.integers(0, 1),
        words=st.lists(st.integers(0, 1), min_size=1, max_size=7),
        tail=st.integers(1, PAGE_TOKENS),
        num_choices=st.integers(1, 3),
    )
    def start(self, domain: int, words: list[int], tail: int, num_choices: int) -> None:
        """A prompt of few different pages, so that prefixes are often shared or computed twice."""
        tokens = [word for word in words for _ in range(PAGE_TOKENS)]
        tokens = tokens[: len(tokens) - PAGE_TOKENS + tail]
        for _ in range(num_choices):
            self._start_one(domain, tokens)

    def _start_one(self, domain: int, tokens: list[int]) -> None:
        sequence = _Sequence(self.kv, domain, list(tokens))
        HASHERS[domain].extend(sequence.keys, tokens)
        num_cached = sequence.table.match_prefix(sequence.keys, len(tokens) - 1)
        assert num_cached % PAGE_TOKENS == 0 and num_cached < len(tokens)
        for index, page in enumerate(sequence.table.pages):
            assert self.written[page] == sequence.content(index)
        sequence.num_computed = num_cached
        self.sequences.append(sequence)

    @rule(chunks=st.lists(st.sampled_from([0, 16, 32, 1, 15, 17, 48]), min_size=1, max_size=6))
    def step(self, chunks: list[int]) -> None:
        """An engine's step: each sequence computes a chunk, the last of them perhaps nothing."""
        for sequence, num_tokens in zip(self.sequences, chunks, strict=False):
            self._compute(sequence, num_tokens)

    def _compute(self, sequence: _Sequence, num_tokens: int) -> None:
        """Draws tokens past the end, and shares the pages that are full."""
        end = sequence.num_computed + num_tokens
        num_free, pages = self.kv.num_free, list(sequence.table.pages)
        missing = -(-end // PAGE_TOKENS) - len(pages)
        if not sequence.table.grow(end):
            assert missing > num_free == self.kv.num_free and sequence.table.pages == pages
            return
        assert self.kv.num_free == num_free - max(missing, 0)
        in_use = {p for s in self.sequences if s is not sequence for p in s.table.pages}
        assert not in_use & set(sequence.table.pages[len(pages) :])
        sequence.tokens += [7] * (end - len(sequence.tokens))
        first = sequence.num_computed // PAGE_TOKENS
        sequence.num_computed = end
        num_full = end // PAGE_TOKENS
        for index in range(first, num_full):
            self.written[sequence.table.pages[index]] = sequence.content(index)
        HASHERS[sequence.domain].extend(sequence.keys, sequence.tokens)
        sequence.table.commit(sequence.keys[:num_full])

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 5))
    def finish(self, index: int) -> None:
        sequence = self.sequences.pop(index % len(self.sequences))
        sequence.table.free()
        assert sequence.table.pages == [] and sequence.table.num_committed == 0

    @rule(num_pages=st.integers(0, 8))
    def evict(self, num_pages: int) -> None:
        num_cached = self.kv.num_cached
        assert self.kv.prefix_cache.evict(num_pages) == min(num_pages, num_cached)
        assert self.kv.num_cached == num_cached - min(num_pages, num_cached)

    @rule()
    def drain_extent(self) -> None:
        extents, num_cached = self.arena.map().count("k"), self.kv.num_cached
        if self.kv.drain_extent():
            assert self.arena.map().count("k") < extents and self.kv.num_cached < num_cached
        else:
            assert (extents, num_cached) == (self.arena.map().count("k"), self.kv.num_cached)

    @rule(num_units=st.integers(1, 3))
    def load_adapter(self, num_units: int) -> None:
        run = self.adapter_runs.allocate(num_units * UNIT_BYTES)
        while run is None and self.kv.drain_extent():
            run = self.adapter_runs.allocate(num_units * UNIT_BYTES)
        if run is not None:
            self.runs.append(run)

    @precondition(lambda self: self.runs)
    @rule()
    def unload_adapter(self) -> None:
        self.adapter_runs.free(self.runs.pop(0))

    @invariant()
    def accounts_agree(self) -> None:
        self.kv.check_integrity([p for s in self.sequences for p in s.table.held_pages])
        self.adapter_runs.check_integrity()
        used = {page for s in self.sequences for page in s.table.held_pages}
        assert self.kv.num_total == len(used) + self.kv.num_free

    @invariant()
    def written_stays(self) -> None:
        """A page that a sequence uses still holds that sequence's tokens."""
        for sequence in self.sequences:
            for index in range(sequence.num_computed // PAGE_TOKENS):
                assert self.written[sequence.table.pages[index]] == sequence.content(index)

    def teardown(self) -> None:
        for sequence in self.sequences:
            sequence.table.free()
        self.kv.check_integrity(held=())
        while self.kv.drain_extent():
            pass
        for run in self.runs:
            self.adapter_runs.free(run)
        assert self.arena.map() == "." * 8


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
