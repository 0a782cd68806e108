"""What waits for a base model that the catalog unloads is refused, requests and probes alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from adapters.reference import AdapterRef
from tests.workers.no_models import make_loop
from tests.workers.simulation import Simulation, generate
from workers.process.server import Delivery
from workers.verification.adapter_verifier import AdapterVerifier
from workers.wire.frames import Probe, ProbeResult
from workers.wire.protocol import Failed
from workers.wire.status import WorkerStatus


def in_progress() -> Iterator[None]:
    while True:
        yield


@pytest.mark.parametrize("is_begun", [False, True])
def test_probes_of_an_unloaded_model_are_refused(is_begun: bool) -> None:
    simulation = Simulation()
    delivered: list[Any] = []

    def deliver(delivery: Delivery) -> None:
        delivered.extend(message for _, message in delivery)

    loop = make_loop(
        simulation.instance,
        simulation.kv.lock,
        simulation.clock,
        deliver=deliver,
        status=lambda *_: WorkerStatus("w", False, [], [], 0, "", {}, 0, 0.0),
    )
    verifier: AdapterVerifier = loop._verifier  # pyright: ignore[reportPrivateUsage]
    served: Any = loop._served  # pyright: ignore[reportPrivateUsage]
    (model,) = served.models.values()
    probes = [(number, Probe(number, "model", AdapterRef("a"))) for number in (1, 2)]
    if is_begun:
        verifier._active["model"] = (*probes.pop(), in_progress())  # pyright: ignore
    verifier._queue.extend(probes)  # pyright: ignore[reportPrivateUsage]
    simulation.submit(generate(1, [1, 2, 3]))
    model.state.tier, model.state.is_unloaded = "host", True
    if is_begun:
        verifier.put_back("model")
    loop._emit(served.advance())  # pyright: ignore[reportPrivateUsage]
    results = [result for _, result in verifier.advance()]
    assert {result.id for result in results} == {1, 2}
    assert {result.error for result in results} == {"adapter.probe.model_unavailable"}
    assert not any(result.is_final for result in results)
    assert all(isinstance(result, ProbeResult) for result in results)
    assert any(isinstance(message, Failed) for message in _failures(delivered))
    assert not verifier.has_work and verifier.num_probes("model") == (0, 0)
    served.advance()
    assert not served.active, "nothing keeps the model active"


def _failures(delivered: list[Any]) -> list[Any]:
    return [
        each
        for message in delivered
        for each in ([message] if isinstance(message, Failed) else getattr(message, "failed", []))
    ]
