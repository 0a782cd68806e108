from __future__ import annotations

import gc
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from adapters.errors import AdapterUnavailable
from adapters.format.signature import sign
from adapters.pool.device import DeviceTier
from adapters.pool.load_cost import LoadCost
from adapters.pool.loads import MAX_FAULTS
from adapters.pool.packed_image import AdapterImage, ImageTables
from adapters.pool.source import AdapterLease, AdapterUse, Loading, NoRoom
from memory.accounts import Tenant
from memory.block_table import BlockTable
from memory.eviction.adapter_memory import UNIT_BYTES
from memory.eviction.broker import MemoryBroker
from memory.page_key import PAGE_TOKENS
from tests.adapters.files import BASE
from tests.adapters.pools import House, Ref, evict_one, turn_of
from tests.memory.holder import num_placements

ONE_UNIT, TWO_UNITS, FIVE_UNITS = 4, 16, 40
"""Ranks whose images take that many units."""
ACME, GLOBEX, INITECH = Tenant("acme", 1), Tenant("globex", 1), Tenant("initech", 1)


def test_a_step_never_waits_for_a_load(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT])
    assert house.lease(house.refs[0]) is None
    assert house.tier(0) == "loading"
    house.executor.step()
    assert house.lease(house.refs[0]) is None
    house.pool.poll()
    assert house.lease(house.refs[0]) is None
    house.check()
    house.executor.step()
    house.pool.poll()
    lease = house.lease(house.refs[0])
    assert lease is not None and lease.max_rank == ONE_UNIT
    assert house.serves(lease.slot, 0)
    house.check()


def test_prefetch_stops_at_the_host(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT])
    house.pool.prefetch(house.refs[0])
    house.settle()
    assert house.tier(0) == "host"
    assert num_placements(house.placements) == 0
    house.check()


def test_a_lease_tells_from_which_tier_its_adapter_came(tmp_path: Path) -> None:
    """As far as it came after the time that is asked for."""
    house = House(tmp_path, [ONE_UNIT])
    house.now = 10.0
    house.pool.prefetch(house.refs[0])
    house.now = 11.0
    house.settle()
    house.now = 12.0
    assert house.lease(house.refs[0]) is None
    house.now = 13.0
    lease = house.load(0)
    assert lease.load_since(9.0) == ("store", 10.0, 13.0, 12.0, 0)
    assert lease.load_since(10.5) == ("store", 10.0, 13.0, 12.0, 0)
    assert lease.load_since(11.0) == ("host", 12.0, 13.0, 12.0, 0)
    assert lease.load_since(13.0) is None


def test_one_that_was_built_before_comes_from_the_disk(tmp_path: Path) -> None:
    House(tmp_path, [ONE_UNIT]).load(0)
    lease = House(tmp_path, [ONE_UNIT]).load(0)
    assert lease.load_since(-1.0) == ("disk", 0.0, 0.0, 0.0, 0)


def test_a_prefetch_that_nobody_waits_for_is_dropped(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT, ONE_UNIT])
    for ref in house.refs:
        house.pool.prefetch(ref)
    house.pool.cancel(house.refs[1])
    house.settle()
    assert (house.tier(0), house.tier(1)) == ("host", None)
    lease = house.load(1)
    assert house.serves(lease.slot, 1)


def test_a_copy_that_nobody_waits_for_is_dropped(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT])
    house.pool.prefetch(house.refs[0])
    house.settle()
    assert house.lease(house.refs[0]) is None
    assert num_placements(house.placements) == 1
    house.pool.cancel(house.refs[0])
    house.check()
    assert (house.tier(0), num_placements(house.placements)) == ("host", 0)
    house.settle()
    assert house.serves(house.load(0).slot, 0)


def test_one_that_is_given_up_while_it_is_fetched_stays_on_the_host(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT])
    fetch = house.loader.fetch
    house.loader.fetch = lambda *a, **k: (house.pool.cancel(house.refs[0]), fetch(*a, **k))[1]
    house.pool.load(house.refs[0])
    house.settle()
    assert (house.tier(0), num_placements(house.placements)) == ("host", 0)


def test_who_gives_up_waiting_does_not_delay_a_pin(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT])
    house.pin(0)
    house.pool.poll()
    house.pool.cancel(house.refs[0])
    assert house.tier(0) == "loading"


def test_a_load_is_charged_to_one_lease_alone(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT])
    first, second = house.load(0), house.load(0)
    assert first.num_loaded_bytes > 0 and second.num_loaded_bytes == 0


@pytest.mark.parametrize("call", ["prefetch", "load", "acquire"])
def test_it_is_charged_to_whoever_asks_first_in_whichever_way(tmp_path: Path, call: str) -> None:
    """A probe that follows is nobody's."""
    house = House(tmp_path, [ONE_UNIT])
    getattr(house.pool, call)(house.refs[0], turn_of(ACME) if call == "acquire" else ACME)
    house.settle()
    house.load(0)
    assert house.placements.held_bytes() == {"acme": UNIT_BYTES}
    house.check()


def test_one_on_its_way_is_not_short_of_room(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT] * 2, num_units=1)
    kept, other = house.refs
    assert house.pool.acquire(kept) == Loading()
    lease = house.load(0)
    assert house.pool.missing_bytes(kept) == 0
    assert house.pool.acquire(other) == Loading()
    house.settle()
    assert house.pool.acquire(other) == NoRoom(lease.num_loaded_bytes)
    assert house.pool.missing_bytes(other) == lease.num_loaded_bytes


def test_leases_share_a_slot_and_keep_it(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT] * 3, num_units=2)
    first, second = house.load(0), house.load(0)
    assert first.slot == second.slot
    other = house.load(1)
    first.release()
    first.release()
    assert house.lease(house.refs[2]) is None
    house.settle()
    assert house.on_device() == {0, 1}
    assert house.lease(house.refs[2]) is None
    second.release()
    third = house.load(2)
    assert house.on_device() == {1, 2}
    assert house.serves(other.slot, 1) and house.serves(third.slot, 2)
    house.check()


def test_the_least_used_goes_first(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT] * 4, num_units=3)
    for index, uses in ((0, 5), (1, 1), (2, 3)):
        for _ in range(uses):
            house.now += 1
            house.load(index).release()
    house.load(3).release()
    assert house.on_device() == {0, 2, 3}


def test_old_uses_fade(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT] * 3, num_units=2)
    for _ in range(20):
        house.load(0).release()
    house.now += 3600
    house.load(1).release()
    house.load(2).release()
    assert house.on_device() == {1, 2}


def test_equal_use_is_lru(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT] * 4, num_units=3)
    for index in (2, 0, 1):
        house.now += 1e-9
        house.load(index).release()
    lease = house.load(3)
    assert house.on_device() == {0, 1, 3}
    load = lease.load_since(-1.0)
    assert load is not None and load.num_evicted == 1


def test_a_load_counts_what_was_evicted_for_it_of_other_models_too(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT] * 2, num_units=1)
    other = house.make_pool()
    other.load(house.refs[0])
    house.settle()
    acquired = other.acquire(house.refs[0])
    assert isinstance(acquired, AdapterLease)
    acquired.release()
    load = house.load(1).load_since(-1.0)
    assert load is not None and load.num_evicted == other.device.num_evictions == 1
    house.pool.close()
    other.close()


def test_a_pinned_adapter_stays(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT] * 3, num_units=2)
    house.pin(0)
    house.settle()
    assert house.on_device() == {0}
    for index in (1, 2, 1, 2):
        house.load(index).release()
    assert 0 in house.on_device() and house.pool.device.num_evictions == 3
    house.unpin(0)
    house.now += 3600
    for index in (1, 2):
        house.load(index).release()
    assert house.on_device() == {1, 2}
    house.check()


def test_slots_bound_what_is_resident(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT] * 3, num_units=8, num_slots=2)
    for index in (0, 1, 2):
        house.load(index).release()
    assert len(house.on_device()) == 2
    house.check()


def use(house: House, index: int, tenant: Tenant, times: int = 1) -> None:
    for _ in range(times):
        house.now += 1.0
        house.pool.prefetch(house.refs[index], tenant)
        house.settle()
    lease = None
    while lease is None:
        lease = house.lease(house.refs[index], tenant)
        house.settle_step()
    lease.release()


def test_a_slot_is_given_up_by_who_holds_most_of_them(tmp_path: Path) -> None:
    """However much it is worth to him."""
    house = House(tmp_path, [ONE_UNIT] * 5, num_units=16, num_slots=4)
    for index in (0, 1, 2):
        use(house, index, ACME, times=9 - index)
    use(house, 3, GLOBEX)
    use(house, 4, INITECH)
    assert house.on_device() == {0, 1, 3, 4}
    house.check()


def test_a_slot_is_not_taken_from_who_holds_no_more(tmp_path: Path) -> None:
    """Whose idle adapter is worth less."""
    house = House(tmp_path, [ONE_UNIT] * 5, num_units=16, num_slots=4)
    for index in (0, 1):
        use(house, index, GLOBEX)
    for index in (2, 3):
        use(house, index, ACME, times=9 - index)
    use(house, 4, ACME)
    assert house.on_device() == {0, 1, 2, 4}
    house.check()


@pytest.mark.parametrize("bounds", [{"num_slots": 4}, {"num_units": 4}])
@pytest.mark.parametrize("is_leased", [True, False])
def test_who_has_most_takes_nothing_from_others(
    tmp_path: Path, bounds: dict[str, int], is_leased: bool
) -> None:
    """His own are in use, or are about to be."""
    house = House(tmp_path, [ONE_UNIT] * 5, **{"num_units": 16, **bounds})  # pyright: ignore
    use(house, 0, GLOBEX)
    for index in (1, 2, 3):
        use(house, index, ACME)
    mine = house.refs[1:4]
    leases = [house.lease(ref, ACME) for ref in mine if is_leased]
    house.pool.prefetch(house.refs[4], ACME)
    house.settle()
    for ref in mine if not is_leased else ():
        house.pool.load(ref, ACME)
    house.pool.load(house.refs[4], ACME)
    assert house.on_device() == {0, 1, 2, 3}
    for lease in leases:
        assert lease is not None
        lease.release()
    house.settle()
    house.pool.load(house.refs[4], ACME)
    house.settle()
    assert 0 in house.on_device() and 4 in house.on_device()
    house.check()


@pytest.mark.parametrize("num_slots", [2, 3])
def test_whose_adapter_one_that_starves_may_have(tmp_path: Path, num_slots: int) -> None:
    """Of an account that holds more, in bytes and where slots are short in those too; for its first
    one of any."""
    ranks = [TWO_UNITS, ONE_UNIT, ONE_UNIT, ONE_UNIT]
    house = House(tmp_path, ranks, num_units=3, num_slots=num_slots)
    theirs, _, more, first = house.refs
    for index, tenant in ((0, GLOBEX), (1, ACME)):
        house.pool.load(house.refs[index], tenant)
        house.settle()
        assert house.lease(house.refs[index], tenant) is not None
    for ref, tenant in ((more, ACME), (first, INITECH)):
        house.pool.prefetch(ref, tenant)
    house.settle()
    house.pool.begin_turns(())
    in_use = [AdapterUse(theirs.digest, turn_of().account, 10)]
    for ref, tenant, may_have in ((more, ACME, num_slots == 3), (first, INITECH, True)):
        turn = turn_of(tenant)
        assert isinstance(house.pool.acquire(ref, turn), NoRoom)
        house.pool.begin_turns(in_use)
        assert house.pool.acquire(theirs, turn) == Loading(), "no sequence starts on a victim"
        assert house.pool.lacks_pages == (not may_have)
        house.pool.cancel(ref)
        house.pool.begin_turns(())
        assert house.lease(theirs, GLOBEX) is not None


@pytest.mark.parametrize("bounds", [{"num_units": 1}, {"num_slots": 1}])
def test_one_that_waits_is_not_evicted_before_its_lease(
    tmp_path: Path, bounds: dict[str, int]
) -> None:
    """Two that ask in every step for room of one: each gets its turn."""
    house = House(tmp_path, [ONE_UNIT] * 2, **bounds)  # pyright: ignore[reportArgumentType]
    turns: list[int] = []
    for _ in range(20):
        house.pool.poll()
        for index, ref in enumerate(house.refs):
            lease = house.lease(ref)
            if lease is not None:
                turns.append(index)
                lease.release()
        house.executor.drain()
        house.check()
    assert turns.count(0) >= 4 and turns.count(1) >= 4


def test_kv_gives_way_where_idle_adapters_do_not_suffice(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT, TWO_UNITS])
    assert house.cache_prefix(1, 12)
    house.load(0).release()
    assert house.map.map() == "kkka"
    lease = house.load(1)
    assert house.on_device() == {1}
    assert house.map.map() == "kkaa" and house.kv.idle.num_pages == 8
    assert house.serves(lease.slot, 1)
    house.check()


def test_nothing_is_given_up_where_it_cannot_help(tmp_path: Path) -> None:
    house = House(tmp_path, [TWO_UNITS, TWO_UNITS, TWO_UNITS, ONE_UNIT], num_units=6)
    leases = [house.load(0), house.load(1)]
    assert house.cache_prefix(1, 4)
    house.load(3).release()
    leases.append(house.load(3))
    assert house.map.map() == "kaaaaa"
    assert house.lease(house.refs[2]) is None
    house.settle()
    assert house.lease(house.refs[2]) is None
    assert house.kv.idle.num_pages == 4 and house.on_device() == {0, 1, 3}
    leases[0].release()
    assert house.serves(house.load(2).slot, 2)
    assert house.kv.idle.num_pages == 4 and house.on_device() == {1, 2, 3}


def test_one_that_can_never_fit_is_unavailable(tmp_path: Path) -> None:
    house = House(tmp_path, [FIVE_UNITS], num_units=4)
    with pytest.raises(AdapterUnavailable) as caught:
        house.load(0)
    assert caught.value.code == "adapter.too_large"
    house.check()


def test_the_host_keeps_its_bound(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT] * 6, host_bytes=UNIT_BYTES)
    for ref in house.refs:
        house.pool.prefetch(ref)
        house.settle()
        house.check()
    on_host = [status for status in house.statuses() if status.tier == "host"]
    assert sum(status.num_bytes for status in on_host) <= UNIT_BYTES
    assert house.tier(5) == "host" and house.tier(0) == "disk"
    assert house.serves(house.load(0).slot, 0)


def test_a_failed_load_is_told_and_tried_again_later(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT])
    missing = Ref("f" * 64)
    assert house.lease(missing) is None
    house.settle()
    for _ in range(2):
        with pytest.raises(AdapterUnavailable) as caught:
            house.lease(missing)
        assert caught.value.code == "adapter.store.missing"
    house.pool.prefetch(missing)
    assert not house.pool.loads.num_open, "it would fail again"
    house.now += 60
    assert house.lease(missing) is None
    house.settle()
    house.check()
    house.now += 60
    other = Ref("e" * 64)
    house.pool.prefetch(other)
    house.settle()
    told = {status.digest: status for status in house.statuses()}
    assert told.keys() == {missing.digest, other.digest}
    for status in told.values():
        assert status.fault is not None and status.fault.code == "adapter.store.missing"
    assert told[missing.digest].tier == "store", "forgotten but for its failure"


def test_a_fault_is_told_until_a_load_succeeds_and_few_are_remembered(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT])
    path = house.store.adapter_folder(house.refs[0].digest) / "adapter_model.safetensors"
    damage(path)
    house.pool.prefetch(house.refs[0])
    house.settle()

    def fault() -> str | None:
        told = {status.digest: status.fault for status in house.statuses()}
        error = told.get(house.refs[0].digest)
        return None if error is None else error.code

    house.now += 3600
    house.pool.prefetch(Ref("e" * 64))
    house.settle()
    assert (fault(), house.tier(0)) == ("adapter.store.corrupt", "store")
    damage(path)
    assert house.serves(house.load(0).slot, 0)
    assert fault() is None
    for number in range(2 * MAX_FAULTS):
        house.pool.prefetch(Ref(f"{number:064x}"))
        house.settle()
    faults = [status.digest for status in house.statuses() if status.fault]
    assert len(faults) == MAX_FAULTS and f"{2 * MAX_FAULTS - 1:064x}" in faults


def test_the_end_of_a_failure_forgets_nobody_else(tmp_path: Path) -> None:
    """Between two polls the adapter is asked for, given up and asked for again."""
    house = House(tmp_path, [ONE_UNIT])
    pool, ref = house.pool, house.refs[0]
    folder, away = house.store.adapter_folder(ref.digest), tmp_path / "away"
    folder.rename(away)
    pool.prefetch(ref)
    house.executor.drain()
    assert house.statuses()[0].fault is not None
    away.rename(folder)
    house.now += 6.0
    pool.prefetch(ref)
    pool.cancel(ref)
    pool.load(ref)
    house.executor.drain()
    assert house.tier(0) == "device"
    pool.poll()
    assert house.tier(0) == "device"
    house.check()


def test_one_that_is_given_up_before_it_loads_is_forgotten(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT] * 2)
    house.load(1)
    assert house.pool.acquire(house.refs[0], turn_of()) == Loading()
    house.pool.cancel(house.refs[0])
    assert [status.digest for status in house.statuses()] == [house.refs[1].digest]


def test_a_slot_that_could_not_be_written_is_not_leased(tmp_path: Path) -> None:
    """Or else the base model would answer in the adapter's name. The image that is cached is whole,
    and of more layers than the model has."""
    house = House(tmp_path, [ONE_UNIT] * 2)
    image = house.loader.fetch(house.refs[0].digest)
    longer = replace(image, tables=ImageTables.empty(BASE.num_layers + 1))
    house.cache.save(house.loader.layout.version, longer)
    with pytest.raises(AdapterUnavailable) as caught:
        house.load(0)
    assert caught.value.code == "adapter.load_failed"
    assert house.on_device() == set() and num_placements(house.placements) == 0
    house.check()
    assert house.serves(house.load(1).slot, 1)


def test_only_what_was_proved_serves(tmp_path: Path) -> None:
    """An image of other bytes, whole in itself, is in the cache and even on the device."""
    house = House(tmp_path, [ONE_UNIT])
    proved = Ref(house.refs[0].digest, house.load(0).checksum)
    layout = house.loader.layout.version
    image = house.cache.load(layout, proved.digest)
    assert image is not None
    other = House(tmp_path, [ONE_UNIT])
    wrong = replace(image, tables=replace(image.tables, rank=image.tables.rank // 2))
    other.cache.save(layout, wrong)
    held = other.load(0)
    assert held.checksum != proved.checksum and not other.serves(held.slot, 0)
    for ref in (proved, other.refs[0]):
        assert other.lease(ref) is None, "in use, but nobody new gets it"
    other.settle()
    assert other.lease(proved) is None
    held.release()
    assert other.lease(proved) is None
    other.settle()
    lease = other.lease(other.refs[0])
    assert lease is not None and lease.checksum == proved.checksum and other.serves(lease.slot, 0)
    other.check()


def test_a_false_checksum_hurts_only_who_claims_it(tmp_path: Path) -> None:
    """Both are asked for in every step, as waiting sequences do."""
    house = House(tmp_path, [ONE_UNIT])
    lease = house.load(0)
    digest = house.refs[0].digest
    true, false = Ref(digest, lease.checksum), Ref(digest, "0" * 64)
    for order in ((true, false), (false, true)):
        other = House(tmp_path, [ONE_UNIT])
        waiting, got = list(order), []
        for _ in range(8):
            for ref in list(waiting):
                try:
                    if (lease := other.lease(ref)) is not None:
                        got.append(ref)
                        waiting.remove(ref)
                except AdapterUnavailable as error:
                    assert ref is false and error.code == "adapter.image.mismatch"
                    waiting.remove(ref)
            other.settle_step()
        assert got == [true] and not waiting
        other.check()


def test_a_failure_that_is_remembered_keeps_no_image(tmp_path: Path) -> None:
    house = House(tmp_path, [])
    wrong = Ref(house.add(ONE_UNIT, seed=4711).digest, "0" * 64)
    assert house.lease(wrong) is None
    house.settle()
    assert [one.digest for one in house.statuses() if one.fault]
    gc.collect()
    images = [each for each in gc.get_objects() if type(each) is AdapterImage]
    assert wrong.digest not in {image.digest for image in images}


def test_a_load_under_way_is_not_taken_when_another_image_was_proved(tmp_path: Path) -> None:
    house = House(tmp_path, [ONE_UNIT])
    proved = Ref(house.refs[0].digest, "0" * 64)
    assert house.lease(house.refs[0]) is None
    house.executor.step()
    house.pool.poll()
    assert num_placements(house.placements) == 1, "the unproved image is being copied"
    assert house.lease(proved) is None
    house.settle()
    assert house.on_device() == {0} and house.lease(proved) is None
    assert house.on_device() == set()
    house.settle()
    with pytest.raises(AdapterUnavailable) as caught:
        house.lease(proved)
    assert caught.value.code == "adapter.image.mismatch"
    assert house.on_device() == set()
    house.check()


def damage(path: Path) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte ^ 16]))


def test_a_damaged_cache_is_mended_a_damaged_store_refused(tmp_path: Path) -> None:
    """By a worker that starts afresh; what is on the host needs no file."""
    house = House(tmp_path, [ONE_UNIT, ONE_UNIT])
    for ref in house.refs:
        house.pool.prefetch(ref)
    house.settle()
    for ref in house.refs:
        damage(next((tmp_path / "cache").rglob(f"{ref.digest}.img")))
    damage(house.store.adapter_folder(house.refs[1].digest) / "adapter_model.safetensors")
    house.load(1).release()
    house = House(tmp_path, [ONE_UNIT, ONE_UNIT])
    assert house.serves(house.load(0).slot, 0)
    with pytest.raises(AdapterUnavailable) as caught:
        house.load(1)
    assert caught.value.code == "adapter.store.corrupt"
    assert house.on_device() == {0}
    house.check()


def test_no_residue_of_a_larger_adapter(tmp_path: Path) -> None:
    house = House(tmp_path, [TWO_UNITS, ONE_UNIT], num_units=2)
    house.load(0).release()
    lease = house.load(1)
    assert house.serves(lease.slot, 1)
    assert lease.max_rank == ONE_UNIT


@pytest.mark.parametrize(("rank", "has_large_factors"), [(128, False), (256, True)])
def test_an_image_in_pieces_serves_as_one(
    tmp_path: Path, rank: int, has_large_factors: bool
) -> None:
    """Its extents are smaller than the image, and with the second rank than some of its factors.
    Every other extent is in use at first."""
    house = House(tmp_path, [rank, *[ONE_UNIT] * 6], num_units=80)
    tables = [BlockTable(house.kv) for _ in range(80)]
    for table in tables:
        assert table.grow(4 * PAGE_TOKENS)
    for table in tables[::2]:
        table.free()
    if has_large_factors:
        assert house.lease(house.refs[0]) is None
        house.settle()
        assert house.lease(house.refs[0]) is None, "no two extents are adjacent"
        for table in tables[:20]:
            table.free()
    lease = house.load(0)
    entry = house.pool.entries[house.refs[0].digest]
    assert entry.placement is not None and len(entry.placement.pieces) > 1
    assert (max(p.stop - p.start for p in entry.placement.pieces) > UNIT_BYTES) == has_large_factors
    assert house.serves(lease.slot, 0)
    house.check([page for table in tables for page in table.held_pages])


@pytest.mark.full
def test_a_thousand_cycles_leak_nothing(tmp_path: Path) -> None:
    house = House(tmp_path, [1, 4, 5, 12, TWO_UNITS], num_units=3, num_slots=2)
    for cycle in range(1000):
        house.now += 0.1
        house.load(cycle * 7 % 5).release()
        assert len(house.pool.device.commands.slots) <= house.num_slots
        if cycle % 50 == 0:
            house.check()
    house.check()
    while evict_one(house.pool.device):
        pass
    assert house.placements.held_bytes().total() == 0
    assert house.map.map() == "..."
    assert not house.tables.rank.any()


def test_real_threads_load_many_at_once(tmp_path: Path) -> None:
    house = House(tmp_path, [1, 4, 5, 12, 16, 8, 4, 4], num_units=16, has_threads=True)
    with house.broker.lock:
        for ref in house.refs:
            house.pool.prefetch(ref)
    leases = {index: await_lease(house, index) for index in range(len(house.refs))}
    assert all(house.serves(lease.slot, index) for index, lease in leases.items())
    assert len({lease.slot for lease in leases.values()}) == len(house.refs)
    for lease in leases.values():
        lease.release()
    house.pool.close()
    assert num_placements(house.placements) == 0


def test_a_copy_does_not_wait_for_the_store(tmp_path: Path) -> None:
    """Which is long in opening another adapter's file: nobody writes into that pipe."""
    house = House(tmp_path, [ONE_UNIT] * 2, has_threads=True)
    await_lease(house, 0).release()
    weights = house.store.adapter_folder(house.refs[1].digest) / "adapter_model.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    with house.broker.lock:
        assert evict_one(house.pool.device)
        house.pool.load(house.refs[1])
    try:
        lease = await_lease(house, 0)
        assert house.serves(lease.slot, 0) and house.tier(1) == "loading"
        lease.release()
    finally:
        weights.open("wb").close()
        house.pool.close()


def await_lease(house: House, index: int) -> AdapterLease:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with house.broker.lock:
            house.pool.poll()
            house.check()
            if lease := house.lease(house.refs[index]):
                return lease
        time.sleep(0.001)
    raise AssertionError(f"adapter {index} does not come")


class Signed(NamedTuple):
    public_key: bytes
    signature: bytes


def test_a_signature_that_is_not_of_its_key_serves_nothing(tmp_path: Path) -> None:
    """The worker checks what the catalog says, whenever it fetches."""
    house = House(tmp_path, ranks=[4])
    key = Ed25519PrivateKey.generate()
    digest = house.refs[0].digest
    public = key.public_key().public_bytes_raw()
    wrong = Signed(public, sign(key, "0" * 64))
    house.refs[0] = replace(house.refs[0], signed=wrong)
    house.pool.prefetch(house.refs[0])
    house.settle_step()
    with pytest.raises(AdapterUnavailable) as caught:
        house.pool.acquire(house.refs[0])
    assert caught.value.code == "adapter.signature.invalid"
    house.now += 3600
    house.pool.poll()
    house.refs[0] = replace(house.refs[0], signed=Signed(public, sign(key, digest)))
    assert house.serves(house.load(0).slot, 0)


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("lacks", ["bytes", "slots"])
@pytest.mark.parametrize("freed", ["adapter", "pages", "time"])
def test_what_finds_no_room_is_tried_again_when_memory_is_freed(
    tmp_path: Path, is_pinned: bool, lacks: str, freed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed attempt looks at all idle items."""
    num_units, num_slots = (2, 8) if lacks == "bytes" else (4, 2)
    house = House(tmp_path, [4, 4, 4], num_units=num_units, num_slots=num_slots)
    scans: list[str] = []
    for owner, name in ((MemoryBroker, "_victims"), (DeviceTier, "_ask_for_slot")):
        call = getattr(owner, name)

        def counted(*arguments: Any, call: Any = call, name: str = name, **options: Any) -> Any:
            scans.append(name)
            return call(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)
    lease = house.load(0)
    table = BlockTable(house.kv)
    if lacks == "bytes":
        assert table.grow(4 * PAGE_TOKENS), "the other unit"
    else:
        house.load(2)
    house.pool.prefetch(house.refs[1])
    house.settle()
    if is_pinned:
        house.pin(1)

    def steps(count: int) -> int:
        before = len(scans)
        for _ in range(count):
            house.pool.poll()
            if not is_pinned:
                house.lease(house.refs[1])
            house.executor.drain()
        return len(scans) - before

    assert steps(50) <= 2
    match freed:
        case "adapter":
            lease.release()
        case "pages" if lacks == "bytes":
            table.free()
        case _:
            house.now += 1.0
            assert 1 <= steps(50) <= 2
            return
    steps(2)
    assert house.tier(1) == "device"
    table.free()
    house.check()


def test_one_slow_load_does_not_raise_the_cost_of_fast_ones_for_long() -> None:
    """A load of a small adapter takes less than the overhead that is assumed for each."""
    cost, num_bytes = LoadCost(), 1 << 16
    cost.record("host", num_bytes, 0.5)
    assert cost.copy_s(num_bytes) > 0.1
    for _ in range(50):
        cost.record("host", num_bytes, 0.0005)
    assert cost.copy_s(num_bytes) < 0.002


def test_loads_cost_what_they_recently_took(tmp_path: Path) -> None:
    """A device with copies of 50 GB/s beside a store of 1 MB/s, and later a slower one."""
    house = House(tmp_path, [4] * 40, num_units=64, num_slots=64)
    loads = house.pool.loads
    copy_s, build_s = loads.cost.copy_s(10**9), loads.cost.build_s(10**6)
    speeds = {"fetch": 1e6, "copy": 5e10}

    fetch = house.loader.fetch

    def slow_fetch(*arguments: Any, **options: Any) -> AdapterImage:
        image = fetch(*arguments, **options)
        house.now += image.num_bytes / speeds["fetch"]
        return image

    house.loader.fetch = slow_fetch
    place = house.pool.device.place

    def slow_place(entry: Any, image: AdapterImage) -> Any:
        copy = place(entry, image)

        def slow_copy() -> AdapterImage:
            house.now += 1e-3 + image.num_bytes / speeds["copy"]
            assert copy is not None
            return copy()

        return None if copy is None else slow_copy

    house.pool.device.place = slow_place
    house.pool.prefetch(house.refs[0], ACME)
    while (first := house.lease(house.refs[0], ACME)) is None:
        house.settle()
    assert first.copy_s == loads.cost.copy_s(first.num_loaded_bytes)
    for index in range(1, 20):
        house.load(index)
    assert 0.02 < loads.cost.copy_s(10**9) < 0.04 and copy_s > 0.3
    assert loads.cost.build_s(10**6) == pytest.approx(1.0, rel=0.1) and build_s < 0.1
    speeds["copy"] = 1e9
    for index in range(20, 40):
        house.load(index)
    assert loads.cost.copy_s(10**9) == pytest.approx(1.0, rel=0.3)
    assert house.lease(house.refs[0]) is not None
