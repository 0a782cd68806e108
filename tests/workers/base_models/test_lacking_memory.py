"""A request that lacks memory shared with other models speaks for its model, not an older one."""

from __future__ import annotations

from typing import Any

from memory.block_table import BlockTable
from memory.kv_cache import KVCache
from tests.workers.no_models import make_loop
from tests.workers.simulation import PAGE_BYTES, Simulation, generate
from workers.wire.protocol import ErrorCode, Failed, ServiceClass


def test_the_request_that_lacks_memory_is_refused_and_not_an_older_one() -> None:
    simulation = Simulation(num_pages=16)
    beside = KVCache(simulation.kv._arena, "other", PAGE_BYTES, source=simulation.kv.source)
    held = BlockTable(beside)
    assert held.grow(16 * 8)
    old = generate(1, [1] * 8, service_class=ServiceClass.BATCH)
    large = generate(2, [2] * 16 * 12, 4, service_class=ServiceClass.INTERACTIVE)
    # Its class was charged before.
    simulation.run(generate(0, [3] * 8, service_class=ServiceClass.BATCH))
    loop = make_loop(
        simulation.instance,
        simulation.kv.lock,
        simulation.clock,
        status=lambda *_: None,  # pyright: ignore
    )
    served: Any = loop._served
    (model,) = served.models.values()
    simulation.submit(old)
    simulation.submit(large)
    simulation.step()
    demand = model.demand
    assert demand.is_short and demand.num_extents == 3
    ((_, failed),) = served._fail_unsatisfiable(model)
    assert isinstance(failed, Failed)
    assert (failed.id, failed.code) == (2, ErrorCode.OVERLOADED)
    simulation.run()
    assert 1 in simulation.finished
