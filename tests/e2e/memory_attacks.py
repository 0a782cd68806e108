"""Attacks of one tenant, and of clients without a key, on a gateway's memory and event loop, by
clients that are held to a tenth of a core; and what another tenant notices of them."""

from __future__ import annotations

import asyncio
import random
import signal
import time
import zlib
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tests.e2e.attack_client import Answers, Attack, Order, attacking
from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.floods import NO_TOKEN, QUEUE, large_request
from tests.e2e.shares import NUM_ROWS, ORDINARY
from tests.e2e.tiny import NAME

GATEWAY_BYTES = 1 << 30
"""Memory that a gateway has in the manifests."""
CLIENT_SHARE = 0.1
"""Maximum share of a core of an attacker's client."""
LOOK_S = 0.02
"""Seconds between checks of this share."""
QUESTION = {"origin": "https://a.example", "access-control-request-method": "POST"}


def _json(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": NAME, **fields})


def attacks() -> list[Attack]:
    """Returns all attacks. Each is bounded by another part of the gateway."""
    # Characters of three or four tokens each.
    dense = "\U0001f9ff\u2603" * 600_000
    bomb = zlib.compress(b" " * (64 << 20))
    texts = ["a"] * 2048
    forms = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    return [
        Attack("long texts, refused", "/v1/completions", _json(prompt=dense), per_s=20),
        Attack("long texts to count", "/tokenize", _json(prompt=dense), per_s=20),
        Attack(
            "long texts, truncated",
            "/v2/embed",
            _json(texts=["ab cd " * 100_000], truncate="END", max_tokens=8),
            per_s=20,
        ),
        Attack(
            "vectors in all forms that are not read",
            "/v2/embed",
            _json(texts=texts, embedding_types=forms),
            per_s=20,
            num_connections=64,
            reads=False,
        ),
        Attack(
            "texts of tokens that are not read",
            "/detokenize",
            _json(tokens=[259] * 32_000),
            num_connections=64,
            reads=False,
        ),
        Attack("bodies of 1 MB, refused", "/v1/completions", _large()),
        Attack("bombs", "/v1/completions", bomb, {"content-encoding": "deflate"}),
        Attack("preflight requests", "/v1/completions", headers=QUESTION, method="OPTIONS"),
    ]


def _large() -> bytes:
    return large_request(random.Random(0), NO_TOKEN)


@asynccontextmanager
async def attacked(folder: Path, **settings: Any) -> AsyncIterator[Cluster]:
    """Starts one gateway and one worker on a paced device. Creates an ordinary tenant and one for
    each attack, so that the refusals of one attack do not end the next."""
    async with running_cluster(
        folder,
        num_workers=1,
        num_gateways=1,
        num_adapters=0,
        tenants=(ORDINARY[0], *(each.tenant for each in attacks())),
        worker="tests.e2e.paced_worker",
        **{"max_num_seqs": NUM_ROWS, "memory": 64 << 20, **QUEUE, **settings},
    ) as cluster:
        yield cluster


@asynccontextmanager
async def slowly_attacking(cluster: Cluster, attack: Attack) -> AsyncIterator[Answers]:
    """Attacks from a process that is held down. The answers are there at the end."""
    url, key = cluster.gateways["gateway-0"].url, cluster.keys[attack.tenant]
    order = Order(url, "" if attack.method == "OPTIONS" else key, attack)
    async with attacking(order) as (answers, process):
        holding = asyncio.create_task(_hold_down(process))
        try:
            yield answers
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            process.send_signal(signal.SIGCONT)


async def _hold_down(process: Process) -> None:
    """Stops the process whenever it has had more than its share of a core."""
    times = psutil.Process(process.pid)
    began, before = time.monotonic(), sum(times.cpu_times()[:2])
    while True:
        await asyncio.sleep(LOOK_S)
        used = sum(times.cpu_times()[:2]) - before
        is_over = used > CLIENT_SHARE * (time.monotonic() - began)
        process.send_signal(signal.SIGSTOP if is_over else signal.SIGCONT)


class Usage:
    """CPU time of the parts of an installation since a moment, and the gateway's memory."""

    def __init__(self, gateway: int, worker: int) -> None:
        self._gateway = psutil.Process(gateway)
        self._worker = psutil.Process(worker)
        # Resets VmHWM to the present size.
        Path(f"/proc/{gateway}/clear_refs").write_text("5")
        self._began = time.monotonic()
        self._before = self._times()

    def _times(self) -> dict[str, float]:
        postgres = 0.0
        for process in psutil.process_iter(["name", "cpu_times"]):
            if "postgres" in (process.info["name"] or "") and process.info["cpu_times"]:
                postgres += sum(process.info["cpu_times"][:2])
        machine = psutil.cpu_times()
        return {
            "gateway": sum(self._gateway.cpu_times()[:2]),
            "postgres": postgres,
            "worker": sum(self._worker.cpu_times()[:2]),
            "machine": sum(machine) - machine.idle - machine.iowait,
        }

    def shares(self) -> dict[str, float]:
        """Returns the cores that each part has used on average. `machine` has all processes."""
        seconds = time.monotonic() - self._began
        now = self._times()
        return {part: (now[part] - self._before[part]) / seconds for part in now}

    @property
    def peak_bytes(self) -> int:
        """Highest resident size of the gateway."""
        status = Path(f"/proc/{self._gateway.pid}/status").read_text().splitlines()
        (line,) = [each for each in status if each.startswith("VmHWM:")]
        return int(line.split()[1]) << 10
