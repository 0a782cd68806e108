from __future__ import annotations

import gc
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from adapters.format.signature import sign
from adapters.pool.device import DeviceTier
from adapters.pool.load_cost import LoadCost
from adapters.pool.loads import MAX_FAULTS
from adapters.pool.packed_image import AdapterImage, ImageTables
from adapters.pool.source import AdapterLease, AdapterUnavailable, AdapterUse, Loading, NoRoom
from adapters.reference import AdapterRef, AdapterSignature
from memory.accounts import Tenant
from memory.block_table import BlockTable
from memory.eviction.adapter_memory import UNIT_BYTES
from memory.eviction.broker import MemoryBroker
from memory.page_key import PAGE_TOKENS
from tests.adapters.files import BASE
from tests.adapters.pools import PoolSetup, evict_one, turn_of
from tests.memory.holder import num_placements

ONE_UNIT, TWO_UNITS, FIVE_UNITS = 4, 16, 40
"""Ranks whose images take that many units."""
ACME, GLOBEX, INITECH = Tenant("acme", 1), Tenant("globex", 1), Tenant("initech", 1)


def test_a_step_never_waits_for_a_load(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT])
    assert setup.lease(setup.refs[0]) is None
    assert setup.tier(0) == "loading"
    setup.executor.step()
    assert setup.lease(setup.refs[0]) is None
    setup.pool.begin_step(())
    assert setup.lease(setup.refs[0]) is None
    setup.check()
    setup.executor.step()
    setup.pool.begin_step(())
    lease = setup.lease(setup.refs[0])
    assert lease is not None and lease.max_rank == ONE_UNIT
    assert setup.serves(lease.slot, 0)
    setup.check()


def test_prefetch_stops_at_the_host(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT])
    setup.pool.prefetch(setup.refs[0])
    setup.settle()
    assert setup.tier(0) == "host"
    assert num_placements(setup.placements) == 0
    setup.check()


def test_a_lease_tells_from_which_tier_its_adapter_came(tmp_path: Path) -> None:
    """As far as it came after the time that is asked for."""
    setup = PoolSetup(tmp_path, [ONE_UNIT])
    setup.now = 10.0
    setup.pool.prefetch(setup.refs[0])
    setup.now = 11.0
    setup.settle()
    setup.now = 12.0
    assert setup.lease(setup.refs[0]) is None
    setup.now = 13.0
    lease = setup.load(0)
    assert lease.load_since(9.0) == ("store", 10.0, 13.0, 12.0, 0)
    assert lease.load_since(10.5) == ("store", 10.0, 13.0, 12.0, 0)
    assert lease.load_since(11.0) == ("host", 12.0, 13.0, 12.0, 0)
    assert lease.load_since(13.0) is None


def test_one_that_was_built_before_comes_from_the_disk(tmp_path: Path) -> None:
    PoolSetup(tmp_path, [ONE_UNIT]).load(0)
    lease = PoolSetup(tmp_path, [ONE_UNIT]).load(0)
    assert lease.load_since(-1.0) == ("disk", 0.0, 0.0, 0.0, 0)


def test_a_prefetch_that_nobody_waits_for_is_dropped(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT, ONE_UNIT])
    for ref in setup.refs:
        setup.pool.prefetch(ref)
    setup.pool.cancel(setup.refs[1])
    setup.settle()
    assert (setup.tier(0), setup.tier(1)) == ("host", None)
    lease = setup.load(1)
    assert setup.serves(lease.slot, 1)


def test_a_copy_that_nobody_waits_for_is_dropped(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT])
    setup.pool.prefetch(setup.refs[0])
    setup.settle()
    assert setup.lease(setup.refs[0]) is None
    assert num_placements(setup.placements) == 1
    setup.pool.cancel(setup.refs[0])
    setup.check()
    assert (setup.tier(0), num_placements(setup.placements)) == ("host", 0)
    setup.settle()
    assert setup.serves(setup.load(0).slot, 0)


def test_one_that_is_given_up_while_it_is_fetched_stays_on_the_host(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT])
    fetch = setup.loader.fetch
    setup.loader.fetch = lambda *a, **k: (setup.pool.cancel(setup.refs[0]), fetch(*a, **k))[1]
    setup.pool.load(setup.refs[0])
    setup.settle()
    assert (setup.tier(0), num_placements(setup.placements)) == ("host", 0)


def test_who_gives_up_waiting_does_not_delay_a_pin(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT])
    setup.pin(0)
    setup.pool.begin_step(())
    setup.pool.cancel(setup.refs[0])
    assert setup.tier(0) == "loading"


def test_a_load_is_charged_to_one_lease_alone(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT])
    first, second = setup.load(0), setup.load(0)
    assert first.num_loaded_bytes > 0 and second.num_loaded_bytes == 0


@pytest.mark.parametrize("call", ["prefetch", "load", "acquire"])
def test_it_is_charged_to_whoever_asks_first_in_whichever_way(tmp_path: Path, call: str) -> None:
    """A probe that follows is nobody's."""
    setup = PoolSetup(tmp_path, [ONE_UNIT])
    getattr(setup.pool, call)(setup.refs[0], turn_of(ACME) if call == "acquire" else ACME)
    setup.settle()
    setup.load(0)
    assert setup.placements.held_bytes() == {"acme": UNIT_BYTES}
    setup.check()


def test_one_on_its_way_is_not_short_of_room(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 2, num_units=1)
    kept, other = setup.refs
    assert setup.pool.acquire(kept) == Loading()
    lease = setup.load(0)
    assert setup.pool.missing_bytes(kept) == 0
    assert setup.pool.acquire(other) == Loading()
    setup.settle()
    assert setup.pool.acquire(other) == NoRoom(lease.num_loaded_bytes)
    assert setup.pool.missing_bytes(other) == lease.num_loaded_bytes


def test_leases_share_a_slot_and_keep_it(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 3, num_units=2)
    first, second = setup.load(0), setup.load(0)
    assert first.slot == second.slot
    other = setup.load(1)
    first.release()
    first.release()
    assert setup.lease(setup.refs[2]) is None
    setup.settle()
    assert setup.on_device() == {0, 1}
    assert setup.lease(setup.refs[2]) is None
    second.release()
    third = setup.load(2)
    assert setup.on_device() == {1, 2}
    assert setup.serves(other.slot, 1) and setup.serves(third.slot, 2)
    setup.check()


def test_the_least_used_goes_first(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 4, num_units=3)
    for index, uses in ((0, 5), (1, 1), (2, 3)):
        for _ in range(uses):
            setup.now += 1
            setup.load(index).release()
    setup.load(3).release()
    assert setup.on_device() == {0, 2, 3}


def test_old_uses_fade(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 3, num_units=2)
    for _ in range(20):
        setup.load(0).release()
    setup.now += 3600
    setup.load(1).release()
    setup.load(2).release()
    assert setup.on_device() == {1, 2}


def test_equal_use_is_lru(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 4, num_units=3)
    for index in (2, 0, 1):
        setup.now += 1e-9
        setup.load(index).release()
    lease = setup.load(3)
    assert setup.on_device() == {0, 1, 3}
    load = lease.load_since(-1.0)
    assert load is not None and load.num_evicted == 1


def test_a_load_counts_what_was_evicted_for_it_of_other_models_too(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 2, num_units=1)
    other = setup.make_pool()
    other.load(setup.refs[0])
    setup.settle()
    acquired = other.acquire(setup.refs[0])
    assert isinstance(acquired, AdapterLease)
    acquired.release()
    load = setup.load(1).load_since(-1.0)
    assert load is not None and load.num_evicted == other.device.num_evictions == 1
    setup.pool.close()
    other.close()


def test_a_pinned_adapter_stays(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 3, num_units=2)
    setup.pin(0)
    setup.settle()
    assert setup.on_device() == {0}
    for index in (1, 2, 1, 2):
        setup.load(index).release()
    assert 0 in setup.on_device() and setup.pool.device.num_evictions == 3
    setup.unpin(0)
    setup.now += 3600
    for index in (1, 2):
        setup.load(index).release()
    assert setup.on_device() == {1, 2}
    setup.check()


def test_slots_bound_what_is_resident(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 3, num_units=8, num_slots=2)
    for index in (0, 1, 2):
        setup.load(index).release()
    assert len(setup.on_device()) == 2
    setup.check()


def use(setup: PoolSetup, index: int, tenant: Tenant, times: int = 1) -> None:
    for _ in range(times):
        setup.now += 1.0
        setup.pool.prefetch(setup.refs[index], tenant)
        setup.settle()
    lease = None
    while lease is None:
        lease = setup.lease(setup.refs[index], tenant)
        setup.settle_step()
    lease.release()


def test_a_slot_is_given_up_by_who_holds_most_of_them(tmp_path: Path) -> None:
    """However much it is worth to him."""
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 5, num_units=16, num_slots=4)
    for index in (0, 1, 2):
        use(setup, index, ACME, times=9 - index)
    use(setup, 3, GLOBEX)
    use(setup, 4, INITECH)
    assert setup.on_device() == {0, 1, 3, 4}
    setup.check()


def test_a_slot_is_not_taken_from_who_holds_no_more(tmp_path: Path) -> None:
    """Whose idle adapter is worth less."""
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 5, num_units=16, num_slots=4)
    for index in (0, 1):
        use(setup, index, GLOBEX)
    for index in (2, 3):
        use(setup, index, ACME, times=9 - index)
    use(setup, 4, ACME)
    assert setup.on_device() == {0, 1, 2, 4}
    setup.check()


@pytest.mark.parametrize("bounds", [{"num_slots": 4}, {"num_units": 4}])
@pytest.mark.parametrize("is_leased", [True, False])
def test_who_has_most_takes_nothing_from_others(
    tmp_path: Path, bounds: dict[str, int], is_leased: bool
) -> None:
    """His own are in use, or are about to be."""
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 5, **{"num_units": 16, **bounds})  # pyright: ignore
    use(setup, 0, GLOBEX)
    for index in (1, 2, 3):
        use(setup, index, ACME)
    mine = setup.refs[1:4]
    leases = [setup.lease(ref, ACME) for ref in mine if is_leased]
    setup.pool.prefetch(setup.refs[4], ACME)
    setup.settle()
    for ref in mine if not is_leased else ():
        setup.pool.load(ref, ACME)
    setup.pool.load(setup.refs[4], ACME)
    assert setup.on_device() == {0, 1, 2, 3}
    for lease in leases:
        assert lease is not None
        lease.release()
    setup.settle()
    setup.pool.load(setup.refs[4], ACME)
    setup.settle()
    assert 0 in setup.on_device() and 4 in setup.on_device()
    setup.check()


@pytest.mark.parametrize("num_slots", [2, 3])
def test_whose_adapter_one_that_starves_may_have(tmp_path: Path, num_slots: int) -> None:
    """Of an account that holds more, in bytes and where slots are short in those too; for its first
    one of any."""
    ranks = [TWO_UNITS, ONE_UNIT, ONE_UNIT, ONE_UNIT]
    setup = PoolSetup(tmp_path, ranks, num_units=3, num_slots=num_slots)
    theirs, _, more, first = setup.refs
    for index, tenant in ((0, GLOBEX), (1, ACME)):
        setup.pool.load(setup.refs[index], tenant)
        setup.settle()
        assert setup.lease(setup.refs[index], tenant) is not None
    for ref, tenant in ((more, ACME), (first, INITECH)):
        setup.pool.prefetch(ref, tenant)
    setup.settle()
    setup.pool.begin_step(())
    in_use = [AdapterUse(theirs.digest, turn_of().account, 10)]
    for ref, tenant, may_have in ((more, ACME, num_slots == 3), (first, INITECH, True)):
        turn = turn_of(tenant)
        assert isinstance(setup.pool.acquire(ref, turn), NoRoom)
        assert setup.pool.begin_step(in_use) == may_have
        assert setup.pool.acquire(theirs, turn) == Loading(), "no sequence starts on a victim"
        setup.pool.cancel(ref)
        setup.pool.begin_step(())
        assert setup.lease(theirs, GLOBEX) is not None


@pytest.mark.parametrize("bounds", [{"num_units": 1}, {"num_slots": 1}])
def test_one_that_waits_is_not_evicted_before_its_lease(
    tmp_path: Path, bounds: dict[str, int]
) -> None:
    """Two that ask in every step for room of one: each gets its turn."""
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 2, **bounds)  # pyright: ignore[reportArgumentType]
    turns: list[int] = []
    for _ in range(20):
        setup.pool.begin_step(())
        for index, ref in enumerate(setup.refs):
            lease = setup.lease(ref)
            if lease is not None:
                turns.append(index)
                lease.release()
        setup.executor.drain()
        setup.check()
    assert turns.count(0) >= 4 and turns.count(1) >= 4


def test_kv_gives_way_where_idle_adapters_do_not_suffice(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT, TWO_UNITS])
    assert setup.cache_prefix(1, 12)
    setup.load(0).release()
    assert setup.map.map() == "kkka"
    lease = setup.load(1)
    assert setup.on_device() == {1}
    assert setup.map.map() == "kkaa" and setup.kv.idle.num_pages == 8
    assert setup.serves(lease.slot, 1)
    setup.check()


def test_nothing_is_given_up_where_it_cannot_help(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [TWO_UNITS, TWO_UNITS, TWO_UNITS, ONE_UNIT], num_units=6)
    leases = [setup.load(0), setup.load(1)]
    assert setup.cache_prefix(1, 4)
    setup.load(3).release()
    leases.append(setup.load(3))
    assert setup.map.map() == "kaaaaa"
    assert setup.lease(setup.refs[2]) is None
    setup.settle()
    assert setup.lease(setup.refs[2]) is None
    assert setup.kv.idle.num_pages == 4 and setup.on_device() == {0, 1, 3}
    leases[0].release()
    assert setup.serves(setup.load(2).slot, 2)
    assert setup.kv.idle.num_pages == 4 and setup.on_device() == {1, 2, 3}


def test_one_that_can_never_fit_is_unavailable(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [FIVE_UNITS], num_units=4)
    with pytest.raises(AdapterUnavailable) as caught:
        setup.load(0)
    assert caught.value.code == "adapter.too_large"
    setup.check()


def test_the_host_keeps_its_bound(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 6, host_bytes=UNIT_BYTES)
    for ref in setup.refs:
        setup.pool.prefetch(ref)
        setup.settle()
        setup.check()
    on_host = [status for status in setup.statuses() if status.tier == "host"]
    assert sum(status.num_bytes for status in on_host) <= UNIT_BYTES
    assert setup.tier(5) == "host" and setup.tier(0) == "disk"
    assert setup.serves(setup.load(0).slot, 0)


def test_a_failed_load_is_told_and_tried_again_later(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT])
    missing = AdapterRef("f" * 64)
    assert setup.lease(missing) is None
    setup.settle()
    for _ in range(2):
        with pytest.raises(AdapterUnavailable) as caught:
            setup.lease(missing)
        assert caught.value.code == "adapter.store.missing"
    setup.pool.prefetch(missing)
    assert not setup.pool.loads.num_open, "it would fail again"
    setup.now += 60
    assert setup.lease(missing) is None
    setup.settle()
    setup.check()
    setup.now += 60
    other = AdapterRef("e" * 64)
    setup.pool.prefetch(other)
    setup.settle()
    told = {status.digest: status for status in setup.statuses()}
    assert told.keys() == {missing.digest, other.digest}
    for status in told.values():
        assert status.fault is not None and status.fault.code == "adapter.store.missing"
    assert told[missing.digest].tier == "store", "forgotten but for its failure"


def test_a_fault_is_told_until_a_load_succeeds_and_few_are_remembered(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT])
    path = setup.store.adapter_folder(setup.refs[0].digest) / "adapter_model.safetensors"
    damage(path)
    setup.pool.prefetch(setup.refs[0])
    setup.settle()

    def fault() -> str | None:
        told = {status.digest: status.fault for status in setup.statuses()}
        error = told.get(setup.refs[0].digest)
        return None if error is None else error.code

    setup.now += 3600
    setup.pool.prefetch(AdapterRef("e" * 64))
    setup.settle()
    assert (fault(), setup.tier(0)) == ("adapter.store.corrupt", "store")
    damage(path)
    assert setup.serves(setup.load(0).slot, 0)
    assert fault() is None
    for number in range(2 * MAX_FAULTS):
        setup.pool.prefetch(AdapterRef(f"{number:064x}"))
        setup.settle()
    faults = [status.digest for status in setup.statuses() if status.fault]
    assert len(faults) == MAX_FAULTS and f"{2 * MAX_FAULTS - 1:064x}" in faults


def test_the_end_of_a_failure_forgets_nobody_else(tmp_path: Path) -> None:
    """Between two polls the adapter is asked for, given up and asked for again."""
    setup = PoolSetup(tmp_path, [ONE_UNIT])
    pool, ref = setup.pool, setup.refs[0]
    folder, away = setup.store.adapter_folder(ref.digest), tmp_path / "away"
    folder.rename(away)
    pool.prefetch(ref)
    setup.executor.drain()
    assert setup.statuses()[0].fault is not None
    away.rename(folder)
    setup.now += 6.0
    pool.prefetch(ref)
    pool.cancel(ref)
    pool.load(ref)
    setup.executor.drain()
    assert setup.tier(0) == "device"
    pool.begin_step(())
    assert setup.tier(0) == "device"
    setup.check()


def test_one_that_is_given_up_before_it_loads_is_forgotten(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 2)
    setup.load(1)
    assert setup.pool.acquire(setup.refs[0], turn_of()) == Loading()
    setup.pool.cancel(setup.refs[0])
    assert [status.digest for status in setup.statuses()] == [setup.refs[1].digest]


def test_a_slot_that_could_not_be_written_is_not_leased(tmp_path: Path) -> None:
    """Or else the base model would answer in the adapter's name. The image that is cached is whole,
    and of more layers than the model has."""
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 2)
    image = setup.loader.fetch(setup.refs[0].digest)
    longer = replace(image, tables=ImageTables.empty(BASE.num_layers + 1))
    setup.cache.save(setup.loader.layout.version, longer)
    with pytest.raises(AdapterUnavailable) as caught:
        setup.load(0)
    assert caught.value.code == "adapter.load_failed"
    assert setup.on_device() == set() and num_placements(setup.placements) == 0
    setup.check()
    assert setup.serves(setup.load(1).slot, 1)


def test_only_what_was_proved_serves(tmp_path: Path) -> None:
    """An image of other bytes, whole in itself, is in the cache and even on the device."""
    setup = PoolSetup(tmp_path, [ONE_UNIT])
    proved = AdapterRef(setup.refs[0].digest, checksum=setup.load(0).checksum)
    layout = setup.loader.layout.version
    image = setup.cache.load(layout, proved.digest)
    assert image is not None
    other = PoolSetup(tmp_path, [ONE_UNIT])
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
    setup = PoolSetup(tmp_path, [ONE_UNIT])
    lease = setup.load(0)
    digest = setup.refs[0].digest
    true, false = (AdapterRef(digest, checksum=checksum) for checksum in (lease.checksum, "0" * 64))
    for order in ((true, false), (false, true)):
        other = PoolSetup(tmp_path, [ONE_UNIT])
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
    setup = PoolSetup(tmp_path, [])
    wrong = AdapterRef(setup.add(ONE_UNIT, seed=4711).digest, checksum="0" * 64)
    assert setup.lease(wrong) is None
    setup.settle()
    assert [one.digest for one in setup.statuses() if one.fault]
    gc.collect()
    images = [each for each in gc.get_objects() if type(each) is AdapterImage]
    assert wrong.digest not in {image.digest for image in images}


def test_a_load_under_way_is_not_taken_when_another_image_was_proved(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [ONE_UNIT])
    proved = AdapterRef(setup.refs[0].digest, checksum="0" * 64)
    assert setup.lease(setup.refs[0]) is None
    setup.executor.step()
    setup.pool.begin_step(())
    assert num_placements(setup.placements) == 1, "the unproved image is being copied"
    assert setup.lease(proved) is None
    setup.settle()
    assert setup.on_device() == {0} and setup.lease(proved) is None
    assert setup.on_device() == set()
    setup.settle()
    with pytest.raises(AdapterUnavailable) as caught:
        setup.lease(proved)
    assert caught.value.code == "adapter.image.mismatch"
    assert setup.on_device() == set()
    setup.check()


def damage(path: Path) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte ^ 16]))


def test_a_damaged_cache_is_mended_a_damaged_store_refused(tmp_path: Path) -> None:
    """By a worker that starts afresh; what is on the host needs no file."""
    setup = PoolSetup(tmp_path, [ONE_UNIT, ONE_UNIT])
    for ref in setup.refs:
        setup.pool.prefetch(ref)
    setup.settle()
    for ref in setup.refs:
        damage(next((tmp_path / "cache").rglob(f"{ref.digest}.img")))
    damage(setup.store.adapter_folder(setup.refs[1].digest) / "adapter_model.safetensors")
    setup.load(1).release()
    setup = PoolSetup(tmp_path, [ONE_UNIT, ONE_UNIT])
    assert setup.serves(setup.load(0).slot, 0)
    with pytest.raises(AdapterUnavailable) as caught:
        setup.load(1)
    assert caught.value.code == "adapter.store.corrupt"
    assert setup.on_device() == {0}
    setup.check()


def test_no_residue_of_a_larger_adapter(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [TWO_UNITS, ONE_UNIT], num_units=2)
    setup.load(0).release()
    lease = setup.load(1)
    assert setup.serves(lease.slot, 1)
    assert lease.max_rank == ONE_UNIT


@pytest.mark.parametrize(("rank", "has_large_factors"), [(128, False), (256, True)])
def test_an_image_in_pieces_serves_as_one(
    tmp_path: Path, rank: int, has_large_factors: bool
) -> None:
    """Its extents are smaller than the image, and with the second rank than some of its factors.
    Every other extent is in use at first."""
    setup = PoolSetup(tmp_path, [rank, *[ONE_UNIT] * 6], num_units=80)
    tables = [BlockTable(setup.kv) for _ in range(80)]
    for table in tables:
        assert table.grow(4 * PAGE_TOKENS)
    for table in tables[::2]:
        table.free()
    if has_large_factors:
        assert setup.lease(setup.refs[0]) is None
        setup.settle()
        assert setup.lease(setup.refs[0]) is None, "no two extents are adjacent"
        for table in tables[:20]:
            table.free()
    lease = setup.load(0)
    entry = setup.pool.entries[setup.refs[0].digest]
    assert entry.placement is not None and len(entry.placement.pieces) > 1
    assert (max(p.stop - p.start for p in entry.placement.pieces) > UNIT_BYTES) == has_large_factors
    assert setup.serves(lease.slot, 0)
    setup.check([page for table in tables for page in table.held_pages])


@pytest.mark.full
def test_a_thousand_cycles_leak_nothing(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [1, 4, 5, 12, TWO_UNITS], num_units=3, num_slots=2)
    for cycle in range(1000):
        setup.now += 0.1
        setup.load(cycle * 7 % 5).release()
        assert len(setup.pool.device.commands.slots) <= setup.num_slots
        if cycle % 50 == 0:
            setup.check()
    setup.check()
    while evict_one(setup.pool.device):
        pass
    assert setup.placements.held_bytes().total() == 0
    assert setup.map.map() == "..."
    assert not setup.tables.rank.any()


def test_real_threads_load_many_at_once(tmp_path: Path) -> None:
    setup = PoolSetup(tmp_path, [1, 4, 5, 12, 16, 8, 4, 4], num_units=16, has_threads=True)
    with setup.broker.lock:
        for ref in setup.refs:
            setup.pool.prefetch(ref)
    leases = {index: await_lease(setup, index) for index in range(len(setup.refs))}
    assert all(setup.serves(lease.slot, index) for index, lease in leases.items())
    assert len({lease.slot for lease in leases.values()}) == len(setup.refs)
    for lease in leases.values():
        lease.release()
    setup.pool.close()
    assert num_placements(setup.placements) == 0


def test_a_copy_does_not_wait_for_the_store(tmp_path: Path) -> None:
    """Which is long in opening another adapter's file: nobody writes into that pipe."""
    setup = PoolSetup(tmp_path, [ONE_UNIT] * 2, has_threads=True)
    await_lease(setup, 0).release()
    weights = setup.store.adapter_folder(setup.refs[1].digest) / "adapter_model.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    with setup.broker.lock:
        assert evict_one(setup.pool.device)
        setup.pool.load(setup.refs[1])
    try:
        lease = await_lease(setup, 0)
        assert setup.serves(lease.slot, 0) and setup.tier(1) == "loading"
        lease.release()
    finally:
        weights.open("wb").close()
        setup.pool.close()


def await_lease(setup: PoolSetup, index: int) -> AdapterLease:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with setup.broker.lock:
            setup.pool.begin_step(())
            setup.check()
            if lease := setup.lease(setup.refs[index]):
                return lease
        time.sleep(0.001)
    raise AssertionError(f"adapter {index} does not come")


def test_a_signature_that_is_not_of_its_key_serves_nothing(tmp_path: Path) -> None:
    """The worker checks what the catalog says, whenever it fetches."""
    setup = PoolSetup(tmp_path, ranks=[4])
    key = Ed25519PrivateKey.generate()
    digest = setup.refs[0].digest
    public = key.public_key().public_bytes_raw()
    wrong = AdapterSignature(public, sign(key, "0" * 64))
    setup.refs[0] = structs.replace(setup.refs[0], signed=wrong)
    setup.pool.prefetch(setup.refs[0])
    setup.settle_step()
    with pytest.raises(AdapterUnavailable) as caught:
        setup.pool.acquire(setup.refs[0])
    assert caught.value.code == "adapter.signature.invalid"
    setup.now += 3600
    setup.pool.begin_step(())
    setup.refs[0] = structs.replace(
        setup.refs[0], signed=AdapterSignature(public, sign(key, digest))
    )
    assert setup.serves(setup.load(0).slot, 0)


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("lacks", ["bytes", "slots"])
@pytest.mark.parametrize("freed", ["adapter", "pages", "time"])
def test_what_finds_no_room_is_tried_again_when_memory_is_freed(
    tmp_path: Path, is_pinned: bool, lacks: str, freed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed attempt looks at all idle items."""
    num_units, num_slots = (2, 8) if lacks == "bytes" else (4, 2)
    setup = PoolSetup(tmp_path, [4, 4, 4], num_units=num_units, num_slots=num_slots)
    scans: list[str] = []
    for owner, name in ((MemoryBroker, "_victims"), (DeviceTier, "_ask_for_slot")):
        call = getattr(owner, name)

        def counted(*arguments: Any, call: Any = call, name: str = name, **options: Any) -> Any:
            scans.append(name)
            return call(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)
    lease = setup.load(0)
    table = BlockTable(setup.kv)
    if lacks == "bytes":
        assert table.grow(4 * PAGE_TOKENS), "the other unit"
    else:
        setup.load(2)
    setup.pool.prefetch(setup.refs[1])
    setup.settle()
    if is_pinned:
        setup.pin(1)

    def steps(count: int) -> int:
        before = len(scans)
        for _ in range(count):
            setup.pool.begin_step(())
            if not is_pinned:
                setup.lease(setup.refs[1])
            setup.executor.drain()
        return len(scans) - before

    assert steps(50) <= 2
    match freed:
        case "adapter":
            lease.release()
        case "pages" if lacks == "bytes":
            table.free()
        case _:
            setup.now += 1.0
            assert 1 <= steps(50) <= 2
            return
    steps(2)
    assert setup.tier(1) == "device"
    table.free()
    setup.check()


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
    setup = PoolSetup(tmp_path, [4] * 40, num_units=64, num_slots=64)
    loads = setup.pool.loads
    copy_s, build_s = loads.cost.copy_s(10**9), loads.cost.build_s(10**6)
    speeds = {"fetch": 1e6, "copy": 5e10}

    fetch = setup.loader.fetch

    def slow_fetch(*arguments: Any, **options: Any) -> AdapterImage:
        image = fetch(*arguments, **options)
        setup.now += image.num_bytes / speeds["fetch"]
        return image

    setup.loader.fetch = slow_fetch
    place = setup.pool.device.place

    def slow_place(entry: Any, image: AdapterImage) -> Any:
        copy = place(entry, image)

        def slow_copy() -> AdapterImage:
            setup.now += 1e-3 + image.num_bytes / speeds["copy"]
            assert copy is not None
            return copy()

        return None if copy is None else slow_copy

    setup.pool.device.place = slow_place
    setup.pool.prefetch(setup.refs[0], ACME)
    while (first := setup.lease(setup.refs[0], ACME)) is None:
        setup.settle()
    assert first.copy_s == loads.cost.copy_s(first.num_loaded_bytes)
    for index in range(1, 20):
        setup.load(index)
    assert 0.02 < loads.cost.copy_s(10**9) < 0.04 and copy_s > 0.3
    assert loads.cost.build_s(10**6) == pytest.approx(1.0, rel=0.1) and build_s < 0.1
    speeds["copy"] = 1e9
    for index in range(20, 40):
        setup.load(index)
    assert loads.cost.copy_s(10**9) == pytest.approx(1.0, rel=0.3)
    assert setup.lease(setup.refs[0]) is not None
