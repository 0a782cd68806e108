"""Who gives way when memory is short, and what it costs in the long run."""

from __future__ import annotations

import pytest

from memory.accounts import Tenant
from memory.arena import Arena
from memory.eviction.adapter_memory import UNIT_BYTES, AdapterMemory, Placement
from memory.eviction.broker import MARGIN, MemoryBroker
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS
from tests.memory.holder import IdleAdapters, make_room, units
from tests.memory.test_prefix_cache import compute, keys_of, num_matched

PAGES = 4
"""Of an extent of one unit."""


class Setup:
    """An arena under a broker: `kv` and `other` for two models, and adapters."""

    def __init__(self, num_extents: int, floor: int = 0, ceiling: int | None = None) -> None:
        top = None if ceiling is None else ceiling * UNIT_BYTES
        self.now = 0.0
        self.arena = Arena(num_extents * UNIT_BYTES, UNIT_BYTES, floor * UNIT_BYTES, top)
        self.memory = AdapterMemory(self.arena)
        self.broker = MemoryBroker(self.arena, self.memory)
        self.adapters = IdleAdapters(self.memory)
        self.broker.add_holder(self.adapters)
        self.kv, self.other = (
            KVCache(
                self.arena, name, UNIT_BYTES // PAGES, source=self.broker, clock=lambda: self.now
            )
            for name in ("kv", "other")
        )
        self.kv.idle.token_s.add(1e9, 10**9)

    def load(self, cost_s: float, num_units: int = 1) -> Placement | None:
        """An idle adapter of that cost."""
        placement = self.broker.allocate_adapter(units(num_units))
        if placement is not None:
            self.adapters.costs[placement] = cost_s
        return placement

    def page_cost_s(self, word: int) -> float:
        """Of the first page of a prefix in `kv`, alone in its extent or with equals."""
        page = self.kv.prefix_cache.match(keys_of(word))
        self.kv.prefix_cache.release(page)
        extent = page[0] // PAGES
        return self.kv.idle.drainable()[extent] / self.kv.pool.num_used_in(extent)


@pytest.mark.parametrize("worth", [0.5 / MARGIN, 2.0 / MARGIN])
def test_pages_are_taken_where_the_loss_is_least(worth: float) -> None:
    """A single page's loss against an extent's worth of adapter, both per byte."""
    setup = Setup(2)
    for word in range(PAGES):
        compute(setup.kv, keys_of(word)).free()
    cost = worth * PAGES * setup.page_cost_s(0)
    run = setup.load(cost)
    assert run is not None and setup.arena.map() == "ka"
    assert make_room(setup.kv, 1)
    is_adapter_cheaper = worth * MARGIN < 1.0
    assert (run not in setup.adapters.costs) == is_adapter_cheaper
    assert setup.kv.idle.num_pages == (PAGES if is_adapter_cheaper else PAGES - 1)


@pytest.mark.parametrize("worth", [0.5 * MARGIN, 2.0 * MARGIN])
def test_adapter_bytes_are_taken_where_the_loss_is_least(worth: float) -> None:
    setup = Setup(2)
    for word in range(PAGES):
        compute(setup.kv, keys_of(word)).free()
    assert setup.load(worth * PAGES * setup.page_cost_s(0)) is not None
    assert setup.load(1e9) is not None
    is_adapter_cheaper = worth < MARGIN
    assert (list(setup.adapters.costs.values()) == [1e9]) == is_adapter_cheaper
    assert setup.kv.idle.num_pages == (PAGES if is_adapter_cheaper else 0)


def test_equals_do_not_take_from_each_other_in_turn() -> None:
    """The adapters' bytes and the pages are worth the same: each makes room for its own kind."""
    setup = Setup(4)
    for word in [*range(2 * PAGES)] * 2:
        compute(setup.kv, keys_of(word)).free()
    cost = PAGES * setup.page_cost_s(0)
    assert setup.load(cost) and setup.load(cost)
    for word in range(100, 140):
        assert setup.load(cost)
        for _ in range(2):
            compute(setup.kv, keys_of(word)).free()
        assert setup.arena.map() == "kkaa"


def test_another_models_prefixes_give_way_too() -> None:
    setup = Setup(2)
    for word in range(2 * PAGES):
        compute(setup.other, keys_of(word)).free()
    assert make_room(setup.kv, 1)
    assert (setup.other.idle.num_pages, setup.arena.map()) == (PAGES, ".k")
    assert setup.load(1.0) is not None
    assert setup.arena.map() == "ak" and setup.other.idle.num_pages == PAGES
    used = compute(setup.other, keys_of(7))
    assert not make_room(setup.kv, 2 * PAGES), "a page is in use"
    assert setup.other.idle.num_pages == PAGES - 1 and len(setup.adapters.costs) == 1
    used.free()
    assert make_room(setup.kv, 2 * PAGES) and setup.arena.map() == ".."


def test_of_what_one_has_in_two_models_no_more_is_taken_than_is_fair() -> None:
    """An extent goes as a whole, and after that who has them holds less than the other asks for."""
    setup = Setup(2)
    for kv in (setup.kv, setup.other):
        compute(kv, keys_of(1, 2, 3, 4), Tenant("globex", 1)).free()
    assert not make_room(setup.kv, 6, Tenant("acme", 1))
    assert setup.arena.bytes_held.held == {"globex": PAGES * setup.kv.pool.page_bytes}
    setup.kv.check_integrity(held=())
    setup.broker.check_integrity()


def test_an_image_displaces_the_cheapest_wherever_they_are() -> None:
    setup = Setup(6)
    placements = [setup.load(cost) for cost in (1.0, 9.0, 2.0, 3.0, 9.0, 1.0)]
    assert None not in placements and setup.arena.map() == "aaaaaa"
    large = setup.broker.allocate_adapter(units(2))
    assert large is not None
    assert large.pieces == ((5 * UNIT_BYTES, 0, UNIT_BYTES), (0, UNIT_BYTES, 2 * UNIT_BYTES))
    assert sorted(setup.adapters.costs.values()) == [2.0, 3.0, 9.0, 9.0]


def test_a_factor_larger_than_an_extent_displaces_neighbours() -> None:
    """And nothing at all while none may go together. The rest of the image is placed anywhere."""
    setup = Setup(6)
    placements = [setup.load(1.0) for _ in range(6)]
    assert None not in placements and setup.arena.map() == "aaaaaa"
    for index in (4, 2, 0):
        setup.adapters.lease(index)
    ends = [UNIT_BYTES, 3 * UNIT_BYTES]
    assert setup.broker.allocate_adapter(ends) is None and len(setup.adapters.costs) == 3
    setup.adapters.go_idle(0, is_awaited=False)
    large = setup.broker.allocate_adapter(ends)
    assert large is not None and len(setup.adapters.costs) == 1
    (small, factor) = large.pieces
    assert (factor.start, factor.stop) == (UNIT_BYTES, 3 * UNIT_BYTES)
    assert small.stop == UNIT_BYTES and setup.arena.map() == "aaaaaa"
    setup.memory.check_integrity()


def test_a_factor_larger_than_an_extent_displaces_nothing_where_the_ceiling_is_in_the_way() -> None:
    setup = Setup(6, ceiling=3)
    assert setup.broker.allocate_adapter(units(2))
    for word in range(4 * PAGES):
        compute(setup.kv, keys_of(word)).free()
    assert setup.broker.allocate_adapter([2 * UNIT_BYTES]) is None
    assert setup.kv.idle.num_pages == 4 * PAGES


def test_the_pages_after_those_of_a_place_count() -> None:
    """Two extents look alike, but a long prefix hangs on the pages of one."""
    setup = Setup(3)
    tables = [compute(setup.kv, keys_of(*words)) for words in ((5, 6, 7, 8), (1, 2, 3, 4))]
    tail = compute(setup.kv, keys_of(1, 2, 3, 4, 9, 8))
    compute(setup.kv, keys_of(5, 6, 7, 8)).free()
    in_use = compute(setup.kv, keys_of(10))
    for table in (tail, *tables):
        table.free()
    own = setup.kv.idle.drainable()
    assert setup.arena.map() == "kkk" and own[0] == pytest.approx(own[1])
    assert setup.load(1.0) is not None
    assert setup.arena.map() == "akk"
    assert num_matched(setup.kv, keys_of(1, 2, 3, 4, 9, 8)) == 6
    in_use.free()


def test_weights_take_what_is_idle_and_costs_least() -> None:
    setup = Setup(6, floor=1)
    for word in range(2 * PAGES):
        compute(setup.kv, keys_of(word)).free()
    in_use = compute(setup.other, keys_of(9))
    dear, cheap = setup.load(1e9), setup.load(1e-9)
    assert dear is not None and cheap is not None and setup.arena.map() == "kkk.aa"
    assert setup.broker.allocate_weights("m", 2) == 2
    assert setup.arena.map() == "kkkwwa" and list(setup.adapters.costs) == [dear]
    assert setup.broker.allocate_weights("m", 5) == 2, "what is in use stays, the floor too"
    assert setup.arena.map() == "wwkwwa"
    assert setup.kv.idle.num_pages == 0 and list(setup.adapters.costs) == [dear]
    in_use.free()
    assert setup.broker.allocate_weights("m", 3) == 1
    assert setup.arena.map() == "wwwwwa"
    setup.arena.free_weights("m")
    assert make_room(setup.kv, 2 * PAGES) and setup.arena.map() == ".....a"


def test_an_image_is_placed_between_weights() -> None:
    setup = Setup(6)
    low = compute(setup.kv, keys_of(1))
    assert setup.broker.allocate_weights("m", 5) == 5
    setup.arena.free_weights("m")
    assert setup.broker.allocate_weights("low", 2) == setup.broker.allocate_weights("m", 2) == 2
    setup.arena.free_weights("low")
    assert setup.arena.map() == "k..ww."
    placement = setup.load(1.0, num_units=3)
    assert placement is not None and len(placement.pieces) == 2
    assert setup.arena.map() == "kaawwa"
    low.free()


def test_floor_and_ceiling_bound_the_trade() -> None:
    setup = Setup(6, floor=2, ceiling=4)
    assert not make_room(setup.kv, 5 * PAGES) and make_room(setup.kv, 4 * PAGES)
    assert setup.load(1.0, num_units=5) is None
    kept = [setup.load(cost) for cost in (4.0, 3.0, 2.0, 1.0)]
    assert None not in kept and setup.arena.map() == "..aaaa"
    assert setup.load(5.0) is not None, "at the ceiling the cheapest adapter leaves"
    assert sorted(setup.adapters.costs.values()) == [2.0, 3.0, 4.0, 5.0]
    assert make_room(setup.kv, 4 * PAGES)
    assert setup.arena.map() == "....aa", "no more is taken from adapters than the floor leaves"


def test_what_must_go_for_one_image_goes_together_or_not_at_all() -> None:
    """With the first of globex' two adapters gone, it holds no more for its weight than acme would
    then: it is to give both, or none."""
    setup = Setup(3)
    acme, globex = Tenant("acme", 3), Tenant("globex", 1)
    for tenant in (acme, globex):
        setup.broker.bytes_held.accounts.note(tenant)
    assert setup.broker.allocate_adapter(units(1), acme.name)
    for _ in range(2):
        placement = setup.broker.allocate_adapter(units(1), globex.name)
        assert placement is not None
        setup.adapters.costs[placement] = 1.0
    assert setup.broker.allocate_adapter(units(3), acme.name) is None
    assert len(setup.adapters.costs) == 2
    assert setup.broker.allocate_adapter(units(2), acme.name) and not setup.adapters.costs


def test_what_somebody_is_about_to_lease_gives_way_to_pages_only() -> None:
    setup = Setup(1)
    run = setup.load(1.0)
    assert run is not None
    setup.adapters.awaited.add(run)
    assert setup.load(1.0) is None
    assert make_room(setup.kv, 1) and not setup.adapters.costs


def test_the_cost_of_a_page_follows_what_prefill_takes() -> None:
    setup = Setup(1)
    assert setup.kv.idle.page_cost_s == pytest.approx(PAGE_TOKENS, rel=1e-6)
    for _ in range(300):
        setup.kv.idle.token_s.add(512e-3, 512)
    assert setup.kv.idle.page_cost_s == pytest.approx(PAGE_TOKENS * 1e-3, rel=0.1)
