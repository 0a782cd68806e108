"""What a gateway believes to be cached at a worker is what is cached there."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import memory.prefix_cache
import workers.wire.prefix_index
from adapters.reference import AdapterRef
from memory.arena import Arena
from memory.block_table import BlockTable
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS
from memory.prefix_cache import Journal
from tests.memory.holder import evict
from workers.scheduling.sequence import Sequence
from workers.wire.frames import CachedPages
from workers.wire.prefix_index import KEY_BYTES, Prefix, PrefixIndex, changed_pages
from workers.wire.protocol import Generate, SamplingParams

LAYOUT = "cpu:float32"
PARAMS = SamplingParams(max_tokens=1, seed=0)
texts = st.sampled_from(["", "a", "acme"])


def kv_cache() -> KVCache:
    return KVCache(Arena(1 << 20, 1 << 16), "m", 1 << 14)


def sequence(request: Generate) -> Sequence:
    return Sequence(
        0,
        request,
        arrival_s=0.0,
        end_tokens=frozenset(),
        block_table=BlockTable(kv_cache()),
        layout=LAYOUT,
    )


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=5 * PAGE_TOKENS),
    texts,
    st.none() | texts,
    st.integers(0, 3 * PAGE_TOKENS),
    texts,
)
def test_a_prompt_has_the_keys_that_the_worker_gives_it(
    tokens: list[int], domain: str, adapter: str | None, activation: int, salt: str
) -> None:
    ref = None if adapter is None else AdapterRef(adapter)
    request = Generate(1, "r", "m", tokens, PARAMS, domain, ref, activation, salt)
    prefix = Prefix(request)
    theirs = [key[:KEY_BYTES] for key in sequence(request).page_keys(len(tokens) // PAGE_TOKENS)]
    assert list(prefix.keys(LAYOUT)) == theirs == list(prefix.keys(LAYOUT))
    assert not set(theirs) & set(prefix.keys("another layout"))


changes = st.lists(
    st.tuples(st.sampled_from("mn"), st.booleans(), st.sets(st.integers(0, 40))), max_size=30
)


@given(changes, st.integers(1, 5))
def test_an_index_has_what_came_and_did_not_leave(
    steps: list[tuple[str, bool, set[int]]], max_keys: int
) -> None:
    first, latecomer = PrefixIndex(), PrefixIndex()
    there: dict[str, set[bytes]] = {"m": set(), "n": set()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers.wire.prefix_index, "MAX_KEYS", max_keys)
        for model, come, numbers in steps:
            keys = {bytes(KEY_BYTES - 1) + bytes([n]) + b"the rest" for n in numbers}
            added, removed = (keys, set[bytes]()) if come else (set[bytes](), keys)
            there[model] = (there[model] | added) - removed
            for frame in changed_pages(model, added, removed):
                assert len(frame.added) <= max_keys * KEY_BYTES
                first.apply(frame)
        for model in there:
            first.apply(CachedPages(model, b""))
            latecomer.apply(CachedPages(model, b"it left.", b""))
        for frame in first.whole():
            latecomer.apply(frame)
    for model, keys in there.items():
        for index in (first, latecomer):
            assert of_model(index, model) == {key[:KEY_BYTES] for key in keys}


def of_model(index: PrefixIndex, model: str) -> set[bytes]:
    told = b"".join(frame.added for frame in index.whole() if frame.model == model)
    return {told[i : i + KEY_BYTES] for i in range(0, len(told), KEY_BYTES)}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5))), st.integers(2, 9))
def test_a_journal_says_what_is_different_now(steps: list[tuple[bool, int]], most: int) -> None:
    journal, numbers = Journal(), count()
    now: set[int] = set()
    known: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.prefix_cache, "MAX_CHANGES", most)
        for come, number in steps:
            if (number in now) != come:
                (now.add if come else now.remove)(number)
                journal.record(bytes([number]), is_added=come)
            if next(numbers) % 4 == 0:
                known = read(journal, known, now)
        known = read(journal, known, now)
    assert known == now


def read(journal: Journal, known: set[int], now: set[int]) -> set[int]:
    changes = journal.take()
    if changes is None:
        return set(now)
    assert sum(map(len, changes)) <= 9
    added, removed = ({key[0] for key in keys} for keys in changes)
    assert not added & known and removed <= known
    return (known | added) - removed


def test_the_cache_s_journal_is_the_cache() -> None:
    kv = kv_cache()
    index = PrefixIndex()
    request = Generate(1, "r", "m", list(range(40)), PARAMS, "d")
    prefix, keys = Prefix(request), sequence(request).page_keys(2)

    def tell() -> int:
        changes = kv.prefix_cache.journal.take()
        assert changes is not None
        for frame in changed_pages("m", *changes):
            index.apply(frame)
        return index.num_cached(prefix, LAYOUT)

    assert tell() == 0
    pages = kv.pool.allocate(2)
    assert pages is not None
    kv.prefix_cache.insert(keys, pages)
    assert tell() == 2 * PAGE_TOKENS
    other = msgspec.structs.replace(request, cache_domain="other")
    assert index.num_cached(Prefix(other), LAYOUT) == 0
    kv.prefix_cache.release(pages)
    assert tell() == 2 * PAGE_TOKENS
    assert evict(kv, 1) == 1
    assert tell() == PAGE_TOKENS
    assert set(kv.prefix_cache.keys) == {keys[0]}
