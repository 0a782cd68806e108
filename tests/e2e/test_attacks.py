"""All attacks of a tenant and of clients without a key at once, beside an ordinary tenant."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.e2e.cluster import TENANTS, Asked, running_cluster
from tests.e2e.floods import other_tenant
from tests.e2e.measured_gateway import SECTIONS_FILE, read_sections
from tests.e2e.memory_attacks import GATEWAY_BYTES, Usage, attacked, attacks, slowly_attacking
from tests.e2e.shares import ORDINARY as ORDINARY_TENANTS
from tests.e2e.tiny import NAME
from tests.e2e.traffic import Traffic
from tests.scale import IS_FULL, scaled
from tests.waiting import eventually

pytestmark = pytest.mark.full

ATTACKED_S = scaled(0, 120)
"""Beyond the first answer to each attack."""
NUM_CLIENTS = 3
SECTION_S = 0.050
"""CPU time that no section of the event loop may exceed, in seconds."""
NOTICED_S = scaled(3, 60)
"""Seconds for which another tenant asks beside each attack."""
MOST_TIMES = 1.5
"""Highest ratio of its p99 of the first token, beside an attack and alone."""
MEMORY_BYTES = 256 << 20
"""What bodies may hold in all, the default of `max_body_memory`."""
ATTACKER, ORDINARY = TENANTS


class Peak:
    """Highest resident size of a process, above its size at the beginning, in bytes."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._clear = Path(f"/proc/{pid}/clear_refs")
        # Resets VmHWM to the present size.
        self._clear.write_text("5")
        self._begin = self._read("VmRSS")

    @property
    def grown(self) -> int:
        return self._read("VmHWM") - self._begin

    def _read(self, name: str) -> int:
        (line,) = [x for x in self._status.read_text().splitlines() if x.startswith(f"{name}:")]
        return int(line.split()[1]) << 10


@pytest.mark.chaos
@pytest.mark.timeout(ATTACKED_S + 300)
async def test_an_ordinary_tenant_does_not_notice_attacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It makes large bodies when it is imported.
    from tests.e2e.attacks import Attacker

    file = tmp_path / "sections"
    monkeypatch.setenv(SECTIONS_FILE, str(file))
    chance = random.Random(0)
    asked = [
        Asked(tuple(chance.randrange(200) for _ in range(20)), 16, model, ORDINARY)
        for model in (NAME, "a000", "a001") * 3
    ]
    async with running_cluster(
        tmp_path,
        num_workers=1,
        num_gateways=1,
        gateway="tests.e2e.measured_gateway",
        memory=32 << 20,
        max_num_seqs=32,
    ) as cluster:
        gateway = cluster.gateways["gateway-0"]
        async with Traffic.of(cluster, asked, NUM_CLIENTS) as traffic:
            await traffic.answers(len(asked))
            file.unlink(missing_ok=True)
            peak = Peak(gateway.pid)
            stopping = asyncio.Event()
            attacker = Attacker(gateway.url, cluster.keys[ATTACKER])
            attacking = asyncio.create_task(attacker.run(stopping))
            await eventually(lambda: attacker.has_tried_all, 120.0)
            await asyncio.sleep(ATTACKED_S)
            stopping.set()
            await attacking
            await traffic.answers(len(asked))
        grown = peak.grown
        for name, statuses in attacker.statuses.items():
            print(f"{name:32} {dict(sorted(statuses.items()))}")
    longest = read_sections(file)[:10]
    print(f"memory grew by {grown >> 20} MiB; {len(traffic.told)} ordinary answers")
    print(*longest, sep="\n")
    assert not traffic.failures, traffic.failures[:5]
    assert grown < MEMORY_BYTES
    too_long = [section for section in longest if section.cpu_s > SECTION_S]
    assert not IS_FULL or not too_long, too_long


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_gateway_survives_attacks_on_its_memory(tmp_path: Path) -> None:
    """Each by a client with a tenth of a core: it stays below 1 GiB, and serves another tenant. The
    full form measures first tokens too; `python -m benchmarks.attacks` prints medians."""
    async with attacked(tmp_path / "cluster") as cluster:
        gateway = cluster.gateways["gateway-0"]
        (worker,) = cluster.workers.values()
        key = cluster.keys[ORDINARY_TENANTS[0]]
        alone = await other_tenant(gateway.url, key, NOTICED_S)
        usage = Usage(gateway.pid, worker.pid)
        for attack in attacks():
            async with slowly_attacking(cluster, attack) as answers:
                beside = await other_tenant(gateway.url, key, NOTICED_S)
            times = beside.p99_ttft_s / alone.p99_ttft_s
            print(f"{attack.name:40} {times:.2f} {answers.statuses} {usage.peak_bytes >> 20} MiB")
            assert gateway.is_running
            assert beside.num_served == beside.num_asked
            assert usage.peak_bytes < GATEWAY_BYTES
            assert not IS_FULL or times <= MOST_TIMES, attack.name
