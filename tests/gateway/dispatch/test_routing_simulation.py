"""On a simulated fleet no simpler choice of a worker is better, whatever the requests are like."""

from __future__ import annotations

import pytest

from benchmarks.routing import CHOICES, WORKLOADS, Outcome, Workload, simulate
from tests.scale import scaled

NUM_WORKERS = scaled(10, 50)
NUM_REQUESTS = scaled(2000, 20_000)
SLACK = 1.25
"""In turn is the best order for equal workers and nearly equal requests."""


def outcomes(workload: Workload) -> dict[str, Outcome]:
    return {
        name: simulate(workload, make(), NUM_WORKERS, NUM_REQUESTS, seed=1)
        for name, make in CHOICES.items()
    }


@pytest.mark.soak
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_nothing_simpler_is_better(workload: Workload) -> None:
    found = outcomes(workload)
    ours = found.pop("ours")
    for name, other in found.items():
        assert ours.mean < SLACK * other.mean, (name, ours, other)
        assert ours.p99 < SLACK * other.p99, (name, ours, other)
        assert ours.requests_per_s > other.requests_per_s / SLACK, (name, ours, other)
    if workload.num_adapters:
        assert ours.on_device > 0.95
    if workload.is_chat:
        assert ours.cached > 1.5 * found["round robin"].cached
    if workload.models:
        assert ours.swaps < found["round robin"].swaps / 4
