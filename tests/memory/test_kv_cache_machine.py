"""Any order of what sequences and adapters of several tenants do to a shared arena keeps pages,
prefixes, reference counts and charges right, and takes from nobody who holds less."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memory.accounts import NO_TENANT, Tenant
from memory.arena import Arena
from memory.block_table import BlockTable
from memory.eviction.adapter_memory import UNIT_BYTES, AdapterMemory
from memory.eviction.broker import MemoryBroker
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS, PageHasher
from tests.memory.holder import IdleAdapters, evict, num_placements, units

PAGE_BYTES = {"m": UNIT_BYTES // 4, "n": UNIT_BYTES // 3}
ACME, GLOBEX, INITECH = Tenant("acme", 3), Tenant("globex", 1), Tenant("initech", 1)
OWNERS = [
    ("m", "tenant:acme", ACME),
    ("m", "group:pair", GLOBEX),
    ("m", "group:pair", INITECH),
    ("n", "tenant:acme", ACME),
    ("n", "tenant:nobody", NO_TENANT),
]
"""(model, cache domain, whom it is charged to)."""
HASHERS = [PageHasher(model=model, domain=domain) for model, domain, _ in OWNERS]

Content = tuple[str, tuple[int, ...]]


class _Sequence:
    """A table and the tokens an engine would have behind it."""

    def __init__(self, kv: KVCache, owner: int, tokens: list[int]) -> None:
        self.kv = kv
        self.account = OWNERS[owner][2]
        self.table = BlockTable(kv, self.account)
        self.owner = owner
        self.tokens = tokens
        self.num_computed = 0
        self.keys: list[bytes] = []

    def content(self, index: int) -> Content:
        return OWNERS[self.owner][1], tuple(self.tokens[: (index + 1) * PAGE_TOKENS])


class SharedArena(RuleBasedStateMachine):
    """Sequences of two models and adapters that load and leave, in one arena under one broker."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.arena = Arena(
            8 * UNIT_BYTES, UNIT_BYTES, UNIT_BYTES, 6 * UNIT_BYTES, clock=lambda: self.now
        )
        self.memory = AdapterMemory(self.arena)
        self.broker = MemoryBroker(self.arena, self.memory)
        self.adapters = IdleAdapters(self.memory)
        self.broker.add_holder(self.adapters)
        self.caches = {
            name: KVCache(self.arena, name, size, source=self.broker, clock=lambda: self.now)
            for name, size in PAGE_BYTES.items()
        }
        self.sequences: list[_Sequence] = []
        self.written: dict[tuple[str, int], Content] = {}

    def snapshot(self) -> object:
        idle = [cache.idle.num_pages for cache in self.caches.values()]
        return self.arena.map(), idle, set(self.adapters.costs), set(self.adapters.in_use)

    def levels(self) -> dict[str, float]:
        return {name: self.arena.bytes_held.level(name) for name in self.arena.bytes_held.held}

    def check_losers(
        self, asker: Tenant, before: dict[str, float], held: dict[str, int], *, is_first: bool
    ) -> None:
        """Whoever lost something held more for its weight than the asker does now."""
        now = self.arena.bytes_held
        for name, num_bytes in held.items():
            if name != asker.name and now.held.get(name, 0) < num_bytes:
                assert is_first or before[name] > now.level(asker.name)

    @rule(seconds=st.sampled_from([0.01, 1.0, 300.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        owner=st.integers(0, len(OWNERS) - 1),
        words=st.lists(st.integers(0, 1), min_size=1, max_size=7),
        tail=st.integers(1, PAGE_TOKENS),
        num_choices=st.integers(1, 3),
    )
    def start(self, owner: int, words: list[int], tail: int, num_choices: int) -> None:
        """A prompt of few different pages, so that prefixes are often shared or computed twice."""
        tokens = [word for word in words for _ in range(PAGE_TOKENS)]
        tokens = tokens[: len(tokens) - PAGE_TOKENS + tail]
        for _ in range(num_choices):
            self._start_one(owner, tokens)

    def _start_one(self, owner: int, tokens: list[int]) -> None:
        model = OWNERS[owner][0]
        sequence = _Sequence(self.caches[model], owner, list(tokens))
        HASHERS[owner].extend(sequence.keys, tokens, len(tokens) // PAGE_TOKENS)
        num_cached = sequence.table.match_prefix(sequence.keys[: (len(tokens) - 1) // PAGE_TOKENS])
        assert num_cached % PAGE_TOKENS == 0 and num_cached < len(tokens)
        for index, page in enumerate(sequence.table.pages):
            assert self.written[model, page] == sequence.content(index)
        sequence.num_computed = num_cached
        self.sequences.append(sequence)

    @rule(
        owner=st.integers(0, len(OWNERS) - 1), word=st.integers(2, 40), num_pages=st.integers(4, 9)
    )
    def serve(self, owner: int, word: int, num_pages: int) -> None:
        """From its start to its end, with nobody else."""
        self._start_one(owner, [word] * num_pages * PAGE_TOKENS)
        sequence = self.sequences[-1]
        self._compute(sequence, num_pages * PAGE_TOKENS - sequence.num_computed)
        self.finish(-1)

    @rule(chunks=st.lists(st.sampled_from([0, 16, 32, 1, 15, 17, 48]), min_size=1, max_size=6))
    def step(self, chunks: list[int]) -> None:
        """An engine's step: each sequence computes a chunk, the last of them perhaps nothing."""
        for sequence, num_tokens in zip(self.sequences, chunks, strict=False):
            self._compute(sequence, num_tokens)

    def _compute(self, sequence: _Sequence, num_tokens: int) -> None:
        """Draws tokens past the end, and shares the pages that are full."""
        kv, model = sequence.kv, OWNERS[sequence.owner][0]
        end = sequence.num_computed + num_tokens
        num_free, pages, before = kv.num_free, list(sequence.table.pages), self.snapshot()
        missing = -(-end // PAGE_TOKENS) - len(pages)
        own = (s for s in self.sequences if s.kv is kv and s.account == sequence.account)
        is_first = not any(s.table.pages for s in own if s is not sequence)
        levels, held = self.levels(), dict(self.arena.bytes_held.held)
        if not sequence.table.grow(end):
            assert sequence.table.pages == pages and (missing > num_free or not is_first)
            if is_first or held.keys() <= {sequence.account.name}:
                assert self.snapshot() == before, "given up in vain"
            self.check_losers(sequence.account, levels, held, is_first=is_first)
            return
        self.check_losers(sequence.account, levels, held, is_first=is_first)
        assert kv.num_free >= num_free - max(missing, 0)
        in_use = {
            p for s in self.sequences if s is not sequence for p in s.table.pages if s.kv is kv
        }
        assert not in_use & set(sequence.table.pages[len(pages) :])
        sequence.tokens += [7] * (end - len(sequence.tokens))
        first = sequence.num_computed // PAGE_TOKENS
        sequence.num_computed = end
        num_full = end // PAGE_TOKENS
        for index in range(first, num_full):
            self.written[model, sequence.table.pages[index]] = sequence.content(index)
        num_pages = len(sequence.tokens) // PAGE_TOKENS
        HASHERS[sequence.owner].extend(sequence.keys, sequence.tokens, num_pages)
        sequence.table.commit(sequence.keys[:num_full])

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 5))
    def finish(self, index: int) -> None:
        sequence = self.sequences.pop(index % len(self.sequences))
        sequence.table.free()
        assert sequence.table.pages == [] and sequence.table.num_committed == 0

    @rule(model=st.sampled_from(["m", "n"]), num_pages=st.integers(0, 8))
    def evict(self, model: str, num_pages: int) -> None:
        kv = self.caches[model]
        num_cached = kv.idle.num_pages
        assert evict(kv, num_pages) == min(num_pages, num_cached)
        assert kv.idle.num_pages == num_cached - min(num_pages, num_cached)

    @rule(model=st.sampled_from(["m", "n"]))
    def drain(self, model: str) -> None:
        kv = self.caches[model]
        costs = kv.idle.drainable()
        if costs:
            extent = min(costs)
            num_cached = kv.idle.num_pages
            kv.idle.drain(extent)
            assert self.arena.is_free(extent) and kv.idle.num_pages < num_cached

    @rule(
        num_units=st.integers(1, 4),
        cost=st.sampled_from([0.0, 1e-4, 1.0]),
        account=st.sampled_from([ACME, GLOBEX, INITECH, NO_TENANT]),
        is_first=st.booleans(),
    )
    def load_adapter(self, num_units: int, cost: float, account: Tenant, is_first: bool) -> None:
        self.broker.bytes_held.accounts.note(account)
        before, levels, held = self.snapshot(), self.levels(), dict(self.arena.bytes_held.held)
        placement = self.broker.allocate_adapter(units(num_units), account.name, is_first=is_first)
        if placement is None:
            assert self.snapshot() == before, "given up in vain"
        else:
            self.check_losers(account, levels, held, is_first=is_first)
            self.adapters.in_use[placement] = cost

    @precondition(lambda self: self.adapters.costs)
    @rule(index=st.integers(0, 5), account=st.sampled_from([ACME, GLOBEX]))
    def another_asks_for_an_adapter(self, index: int, account: Tenant) -> None:
        placement = list(self.adapters.costs)[index % len(self.adapters.costs)]
        self.memory.charge(placement, account.name)

    @precondition(lambda self: self.adapters.in_use)
    @rule(index=st.integers(0, 5), is_awaited=st.booleans())
    def adapter_goes_idle(self, index: int, is_awaited: bool) -> None:
        self.adapters.go_idle(index, is_awaited=is_awaited)

    @precondition(lambda self: self.adapters.costs)
    @rule(index=st.integers(0, 5))
    def adapter_is_leased_again(self, index: int) -> None:
        self.adapters.lease(index)

    @invariant()
    def accounts_agree(self) -> None:
        for kv in self.caches.values():
            mine = [sequence for sequence in self.sequences if sequence.kv is kv]
            kv.check_integrity([p for s in mine for p in s.table.held_pages])
            used = {page for s in mine for page in s.table.held_pages}
            assert kv.num_total == len(used) + kv.num_free
            tables = Counter(s.account.name for s in mine if s.table.pages)
            assert kv.tables.held == tables
        self.memory.check_integrity()
        self.broker.check_integrity()
        assert num_placements(self.memory) == len(self.adapters.costs) + len(self.adapters.in_use)

    @invariant()
    def written_stays(self) -> None:
        """A page that a sequence uses still holds that sequence's tokens."""
        for sequence in self.sequences:
            model = OWNERS[sequence.owner][0]
            for index in range(sequence.num_computed // PAGE_TOKENS):
                assert self.written[model, sequence.table.pages[index]] == sequence.content(index)

    def teardown(self) -> None:
        for sequence in self.sequences:
            sequence.table.free()
        for kv in self.caches.values():
            kv.check_integrity(held=())
            evict(kv, kv.idle.num_pages)
        while self.adapters.in_use:
            self.adapters.go_idle(0, is_awaited=False)
        for placement in list(self.adapters.costs):
            self.adapters.evict(placement)
        assert self.arena.map() == "." * 8 and not self.arena.bytes_held.held


TestSharedArena = SharedArena.TestCase
TestSharedArena.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
