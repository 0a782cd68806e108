"""Whose turn it is, charge by charge, without a device."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import msgspec
import pytest

from memory.arena import Arena
from memory.block_table import BlockTable
from memory.kv_cache import KVCache
from tests.workers.scheduling.test_fairness import ask
from workers.policies.fair_queue import MAX_PASSED, FairQueue
from workers.policies.over_share import OverShare
from workers.policies.tenant_queue import QueueLoad
from workers.scheduling.sequence import Sequence, SequenceStatus
from workers.wire.protocol import ServiceClass

INTERACTIVE, STANDARD, BATCH = ServiceClass


class Setup:
    def __init__(self) -> None:
        self.queue = FairQueue()
        self._kv = KVCache(Arena(1 << 20, 1 << 16), "m", 1 << 14)
        self._random = random.Random(1)
        self._num_asked = 0

    def add(
        self,
        tenant: str,
        service_class: ServiceClass = STANDARD,
        *,
        weight: int = 1,
        max_tokens: int = 1,
        adapter: str | None = None,
    ) -> Sequence:
        fields = {"service_class": service_class, "adapter": adapter}
        request = ask(self._random, tenant, 10, max_tokens, **fields)
        self._num_asked += 1
        sequence = Sequence(
            0,
            msgspec.structs.replace(request, weight=weight),
            arrival_s=float(self._num_asked),
            end_tokens=frozenset(),
            block_table=BlockTable(self._kv),
            layout="",
        )
        self.queue.add(sequence)
        return sequence

    def serve(self, num_tokens: int) -> Counter[str]:
        """How many of so many each tenant got; nobody's prompt ends."""
        served: Counter[str] = Counter()
        for _ in range(num_tokens):
            sequence = next(self.queue.in_turn(lambda _: False))
            self.queue.charge(self.queue.tenant_of(sequence), 1.0)
            served[sequence.request.tenant] += 1
        return served


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_a_class_that_comes_back_has_no_credit(setup: Setup) -> None:
    setup.add("standard", STANDARD)
    setup.serve(1000)
    setup.add("interactive", INTERACTIVE)
    served = setup.serve(900)
    assert served["interactive"] == pytest.approx(600, abs=2)


def test_a_class_that_comes_where_nobody_is_has_no_credit(setup: Setup) -> None:
    """Nor when the one that was there before comes back."""
    gone = setup.add("standard", STANDARD)
    setup.serve(1000)
    setup.queue.remove(gone)
    setup.add("batch", BATCH)
    setup.add("standard", STANDARD)
    served = setup.serve(400)
    assert served["standard"] == pytest.approx(300, abs=2)


def test_a_tenant_that_comes_where_nobody_is_has_no_credit(setup: Setup) -> None:
    gone = setup.add("a")
    setup.serve(1000)
    setup.queue.remove(gone)
    for tenant in ("b", "a"):
        setup.add(tenant)
    assert setup.serve(400)["b"] == pytest.approx(200, abs=2)


def test_who_comes_back_is_with_the_least_of_those_who_stayed(setup: Setup) -> None:
    """And not with those who were charged more than they were due."""
    ahead = setup.add("ahead")
    setup.add("least")
    setup.queue.charge(setup.queue.tenant_of(ahead), 500.0)
    setup.add("back")
    assert setup.serve(100) == {"least": 50, "back": 50}


def test_what_was_charged_counts_in_the_same_round(setup: Setup) -> None:
    for tenant in ("a", "b"):
        for _ in range(3):
            setup.add(tenant)
    setup.add("c", weight=2)
    setup.add("c", weight=2)
    order: list[str] = []
    for sequence in setup.queue.in_turn(lambda _: False):
        order.append(sequence.request.tenant)
        setup.queue.charge(setup.queue.tenant_of(sequence), 1.0)
    assert order == ["a", "b", "c", "c", "a", "b", "a", "b"]


def test_of_who_is_full_only_what_has_begun_is_in_turn(setup: Setup) -> None:
    begun, *_ = [setup.add("full") for _ in range(3)]
    begun.status = SequenceStatus.RUNNING
    setup.queue.start(begun)
    other = setup.add("other")
    found = list(setup.queue.in_turn(lambda account: account.tenant == "full"))
    assert {id(sequence) for sequence in found} == {id(begun), id(other)}


def test_what_looking_costs_is_bounded_for_each_tenant(setup: Setup) -> None:
    """By sequences in a row that were blocked. Those that wait without a block do not count."""

    def blocked(sequences: Iterator[Sequence]) -> Iterator[Sequence]:
        for sequence in sequences:
            setup.queue.tenant_of(sequence).num_passed += 1
            yield sequence

    many = [setup.add("many") for _ in range(2 * MAX_PASSED)]
    last = setup.add("other")
    assert list(setup.queue.in_turn(lambda _: False)) == [*many, last]
    found = list(blocked(setup.queue.in_turn(lambda _: False)))
    assert found == [*many[:MAX_PASSED], last]
    turns = blocked(setup.queue.in_turn(lambda _: False))
    assert list(islice(turns, MAX_PASSED)) == many[:MAX_PASSED]
    setup.queue.charge(setup.queue.tenant_of(many[MAX_PASSED - 1]), 1.0)
    assert list(turns) == [last, *many[MAX_PASSED:]]


def test_the_newest_sequence_of_the_over_share_tenant_with_most_slots_gives_way(
    setup: Setup,
) -> None:
    """Not of a tenant that was charged more, nor of one within its share that runs more."""
    tenants = (("some", 4, 1), ("most", 6, 1), ("within", 8, 1), ("asks", 1, 20))
    rows: dict[str, list[Sequence]] = {}
    for tenant, num_rows, weight in tenants:
        rows[tenant] = []
        for _ in range(num_rows):
            sequence = setup.add(tenant, weight=weight)
            sequence.status = SequenceStatus.RUNNING
            setup.queue.start(sequence)
            rows[tenant].append(sequence)
    queue_of = {tenant: setup.queue.tenant_of(each[0]) for tenant, each in rows.items()}
    over_share = OverShare(setup.queue, max_num_seqs=16)
    for _ in range(100):
        for tenant, cost in (("most", 100.0), ("some", 110.0)):
            setup.queue.charge(queue_of[tenant], cost)
            over_share.record(queue_of[tenant], cost)
    running = [sequence for each in rows.values() for sequence in each]
    assert over_share.victim(queue_of["asks"], running) is rows["most"][-1]
    assert over_share.victim(queue_of["some"], running) is None


def test_a_load_is_what_was_added_and_not_taken_back() -> None:
    load, other = QueueLoad(1, 10, 100), QueueLoad(2, 20, 200)
    assert load.changed(other, 1) == QueueLoad(3, 30, 300)
    assert load.changed(other, 1).changed(other, -1) == load
