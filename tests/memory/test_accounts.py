"""Who gives way to whom: in the order that the rule says, to the page."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from memory.accounts import ACTIVE_S, NO_TENANT, Accounts, Ask, Holdings, Tenant
from memory.arena import Arena
from memory.block_table import BlockTable
from memory.eviction.adapter_memory import UNIT_BYTES, AdapterMemory
from memory.eviction.broker import MemoryBroker
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS, PageHasher
from tests.memory.holder import page_keys

PAGE = UNIT_BYTES // 4
ACME, GLOBEX = Tenant("acme", 1), Tenant("globex", 1)


class Cache:
    """One model's cache under a clock, and prompts of one page each."""

    def __init__(self, num_pages: int) -> None:
        self.now = 0.0
        self.arena = Arena(num_pages * PAGE, UNIT_BYTES, clock=lambda: self.now)
        broker = MemoryBroker(self.arena, AdapterMemory(self.arena))
        self.kv = KVCache(self.arena, "m", PAGE, source=broker, clock=lambda: self.now)
        self._words = 0

    def start(self, account: Tenant, num_pages: int = 1) -> BlockTable | None:
        """A new prompt is computed, and still in use."""
        table = BlockTable(self.kv, account)
        if not table.grow(num_pages * PAGE_TOKENS):
            return None
        self._words += 1
        tokens = [self._words] * num_pages * PAGE_TOKENS
        table.commit(page_keys(PageHasher(model="m", domain=account.name), tokens))
        return table

    def serve(self, account: Tenant, num_prompts: int = 1) -> None:
        for _ in range(num_prompts):
            table = self.start(account)
            assert table is not None
            table.free()

    def num_pages(self, account: Tenant) -> int:
        return self.arena.bytes_held.held.get(account.name, 0) // PAGE


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Tenant], list[int], list[int], int, int]:
    """Accounts, the idle and the used pages of each, who asks, and for how many."""
    weights = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    accounts = [Tenant(f"t{index}", weight) for index, weight in enumerate(weights)]
    idle = [draw(st.integers(0, 8)) for _ in accounts]
    used = [draw(st.integers(0, 4)) for _ in accounts]
    asker = draw(st.integers(0, len(accounts) - 1))
    return accounts, idle, used, asker, draw(st.integers(1, 12))


@settings(max_examples=300, deadline=None)
@given(situations())
def test_pages_go_from_the_top(
    situation: tuple[list[Tenant], list[int], list[int], int, int],
) -> None:
    accounts, idle, used, asker, num_asked = situation
    cache = Cache(-(-max(sum(idle) + sum(used), 1) // 4) * 4)
    tables: list[BlockTable | None] = []
    for account, num_idle, num_used in zip(accounts, idle, used, strict=True):
        cache.serve(account, num_idle)
        tables += [cache.start(account) for _ in range(num_used)]
    num_missing = num_asked - cache.kv.pool.num_free
    expected = waterfall(accounts, idle, used, asker, num_asked, num_missing)
    table = cache.start(accounts[asker], num_asked)
    if expected is None:
        assert table is None
        expected = idle
    left = [num + used[index] for index, num in enumerate(expected)]
    if table is not None:
        left[asker] += num_asked
    assert [cache.num_pages(account) for account in accounts] == left
    held = [page for t in [*tables, table] if t is not None for page in t.held_pages]
    cache.kv.check_integrity(held)


def waterfall(
    accounts: list[Tenant],
    idle: list[int],
    used: list[int],
    asker: int,
    num_asked: int,
    num_missing: int,
) -> list[int] | None:
    """The rule, page by page: idle pages left of each; None if too few give way."""
    left = list(idle)
    is_first = used[asker] == 0

    def level(index: int) -> float:
        extra = num_asked if index == asker else 0
        return (left[index] + used[index] + extra) / accounts[index].weight

    for _ in range(max(num_missing, 0)):
        givers = [i for i, num in enumerate(left) if num]
        if not is_first:
            givers = [i for i in givers if i == asker or level(i) > level(asker)]
        if not givers:
            return None
        left[max(givers, key=lambda i: (level(i), i == asker, -i))] -= 1
    return left


def test_one_that_is_alone_has_everything() -> None:
    cache = Cache(16)
    cache.serve(ACME, 16)
    assert cache.num_pages(ACME) == 16
    table = cache.start(ACME, 16)
    assert table is not None and cache.num_pages(ACME) == 16


def test_nobody_is_displaced_while_there_is_room() -> None:
    cache = Cache(16)
    cache.serve(GLOBEX, 12)
    cache.serve(ACME, 4)
    assert cache.num_pages(GLOBEX) == 12


def test_a_flood_stops_at_what_others_keep() -> None:
    cache = Cache(16)
    cache.serve(GLOBEX, 5)
    running = [cache.start(ACME, 4) for _ in range(3)]
    assert running[0] and running[1] and running[2] is None, "the third would displace another's"
    cache.serve(ACME, 100)
    assert (cache.num_pages(GLOBEX), cache.num_pages(ACME)) == (5, 11)
    running[1].free()
    running[0].free()
    whole = cache.start(ACME, 14)
    assert whole is not None, "but one prompt at a time may be of any size"
    assert cache.num_pages(GLOBEX) == 2


def test_who_comes_back_gets_its_share() -> None:
    cache = Cache(16)
    cache.serve(ACME, 16)
    cache.serve(GLOBEX, 100)
    assert (cache.num_pages(ACME), cache.num_pages(GLOBEX)) == (8, 8)
    heavy = Tenant("heavy", 2)
    cache.serve(heavy, 100)
    assert Counter(cache.arena.bytes_held.held) == {
        "acme": 4 * PAGE,
        "globex": 4 * PAGE,
        "heavy": 8 * PAGE,
    }


def test_who_is_away_for_long_has_no_share() -> None:
    cache = Cache(16)
    cache.serve(GLOBEX, 4)
    cache.now += 0.9 * ACTIVE_S
    cache.serve(ACME, 100)
    assert cache.num_pages(GLOBEX) == 4
    cache.now += 0.2 * ACTIVE_S
    cache.serve(ACME, 2)
    assert cache.num_pages(GLOBEX) == 2, "its pages go before any of the others'"


def test_what_nobody_asked_for_goes_first() -> None:
    cache = Cache(16)
    cache.serve(NO_TENANT, 8)
    cache.serve(ACME, 8)
    cache.serve(GLOBEX, 4)
    assert (cache.num_pages(NO_TENANT), cache.num_pages(ACME)) == (4, 8)


def test_what_several_hold_goes_when_the_last_of_them_gives_way() -> None:
    accounts = Accounts(lambda: 0.0)
    for tenant in (ACME, GLOBEX):
        accounts.note(tenant)
    holdings = Holdings(accounts, [(ACME.name, 6), (GLOBEX.name, 2)])
    ask = Ask(holdings, NO_TENANT.name, 0, is_first=False)
    assert ask.priority([ACME.name]) < ask.priority([GLOBEX.name])
    for names in ((ACME.name, GLOBEX.name), (GLOBEX.name, ACME.name)):
        assert ask.priority(names) == ask.priority([GLOBEX.name])
