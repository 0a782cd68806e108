"""Graphs are captured while no weights are copied: a capture waits for the whole device."""

from __future__ import annotations

from typing import Any, cast

from tests.workers.no_models import make_loop
from tests.workers.simulation import Simulation
from workers.base_models.residency import ModelState
from workers.base_models.served_model import ServedModel
from workers.wire.protocol import ModelInfo
from workers.wire.status import WorkerStatus


class Graphs:
    can_capture = True
    num_captures = 0

    def capture_next(self) -> None:
        self.num_captures += 1


def test_no_graph_is_captured_while_weights_of_another_model_are_copied() -> None:
    one, two = Simulation(), Simulation()
    two.engine.info = ModelInfo("other", "o", 4096)
    loop = make_loop(
        *(one.instance, one.kv.lock, one.clock),
        status=lambda *_: WorkerStatus("w", False, [], [], 0, "", {}, 0, 0.0),
    )
    served: Any = loop._served  # pyright: ignore[reportPrivateUsage]
    (model,) = served.models.values()
    instance, graphs = two.instance, Graphs()
    other = ServedModel(
        *(instance.engine, instance.pool, instance.report, instance.effect_proof),
        plan=cast(Any, None),
        state=ModelState("other", 0, 0.0, tier="device"),
        make_runner=cast(Any, None),
        num_bytes=0,
    )
    served.add(other)
    model.graphs, other.copy_begun_s = graphs, 0.0
    served.advance()
    assert graphs.num_captures == 0
    other.copy_begun_s = None
    served.advance()
    assert graphs.num_captures == 1
