"""Compares a gateway's CPU time per request without tracing and with 10 % of the requests traced.

    python -m benchmarks.tracing [requests per turn] [turns]

Turns with and without tracing alternate. Gateway, a scripted worker and the client are one process,
and the receiver of traces is another. With a real worker, the gateway and its traces have a smaller
share of the cost of a request.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from gateway.tracing import Tracing
from tests.gateway.scripts import say
from tests.gateway.service import Service, make_store
from tests.otlp_receiver import otlp_receiver
from tests.tracing import traced

SHARE = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"}


@contextmanager
def receiver_apart() -> Iterator[str]:
    """Starts a receiver of traces in another process. Yields its URL."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs,))
    process.start()
    yield ours.recv()
    ours.send(None)
    process.join()


def _receive(pipe: Connection) -> None:
    with otlp_receiver() as receiver:
        pipe.send(receiver.url)
        pipe.recv()


def start(store: Path, tracing: Tracing) -> Service:
    service = Service(store, tracing=tracing)
    service.start()
    service.worker.script = say("as long as a short answer is")
    return service


def cpu_us(service: Service, count: int) -> float:
    """Sends `count` requests. Returns this process's CPU time per request, in microseconds."""
    headers = {"authorization": f"Bearer {service.keys.acme}"}
    body = {"model": "support-bot", "prompt": "Where is it?", "max_tokens": 40, "stream": True}
    with httpx.Client(base_url=service.url, headers=headers) as client:
        begun = time.process_time()
        for _ in range(count):
            assert client.post("/v1/completions", json=body).status_code == 200
        return (time.process_time() - begun) / count * 1e6


def main() -> None:
    num_requests, num_turns = (*map(int, sys.argv[1:]), *(200, 12)[len(sys.argv) - 1 :])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(receiver_apart())
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "5000"}
        tracing, _ = stack.enter_context(traced(**variables, **SHARE))
        services = {"off": start(make_store(folder), Tracing()), "10 %": start(folder, tracing)}
        ratios: list[float] = []
        for turn in range(-1, num_turns):
            order = list(services)[:: 1 if turn % 2 else -1]
            taken = {name: cpu_us(services[name], num_requests) for name in order}
            if turn >= 0:  # the first turn is a warm-up
                ratios.append(taken["10 %"] / taken["off"])
                print({name: round(us) for name, us in taken.items()}, f"{ratios[-1]:.3f}")
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"traced at 10 % / off: median {middle:.3f}, quartiles {low:.3f} to {high:.3f}")
        for service in services.values():
            service.stop()


if __name__ == "__main__":
    main()
