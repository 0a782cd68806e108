"""What a stack's worker says of itself on its own HTTP listener."""

from __future__ import annotations

import httpx

from tests.stack import Stack


def _get(stack: Stack, path: str) -> httpx.Response:
    socket = next(stack.data_dir.rglob("*health*.sock"))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket))) as client:
        return client.get(f"http://worker{path}")


def worker_metrics(stack: Stack) -> dict[str, float]:
    """Prometheus values by name, summed over labels."""
    values: dict[str, float] = {}
    for line in _get(stack, "/metrics").text.splitlines():
        name = line.partition("{")[0].split()[0]
        values[name] = values.get(name, 0.0) + float(line.rsplit(None, 1)[1])
    return values


def worker_steps(stack: Stack) -> dict[str, list[float]]:
    """The step ring by column, oldest first."""
    return _get(stack, "/steps").json()
