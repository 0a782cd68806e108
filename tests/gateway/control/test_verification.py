"""Versions become ready when a worker has proved them, over a real Postgres."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.control import verification
from store.database import EVERYTHING, Database
from store.periodic import in_background
from tests.admin.lifecycle import DIGITS, add, claim, prove
from tests.gateway.live import Live
from tests.proxy import PostgresProxy
from tests.scripted_worker import LAYOUT, proved
from tests.waiting import eventually
from workers.wire.frames import Probe, ProbeResult


async def upload(live: Live, *digits: str) -> None:
    for digit in digits:
        async with live.database.transaction() as connection:
            await add(connection, live.tenant_id, digit)


async def states(live: Live) -> list[str]:
    rows = await live.fetch("SELECT state FROM adapter_versions ORDER BY name, version")
    return [row["state"] for row in rows]


async def test_what_is_uploaded_is_proved_and_served(live: Live) -> None:
    async with live.worker, live.gateway() as plane:
        refused = await plane.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        await upload(live, "a")
        await eventually(lambda: plane.serves("bot"))
        answer = await plane.complete()
        assert answer.headers["loraplex-adapter-version"] == "1"
    (proof,) = await live.fetch("SELECT * FROM adapter_proofs")
    checksum = hashlib.sha256(("a" * 64).encode()).hexdigest()
    assert (proof["digest"], proof["layout"], proof["checksum"]) == ("a" * 64, LAYOUT, checksum)
    assert (proof["fingerprint"]["tokens"], proof["worker"]) == ([1], "scripted")
    sent = live.worker.requests[-1].adapter
    assert sent is not None and (sent.name, sent.checksum) == ("bot@1", checksum)


async def test_a_version_that_is_not_proved_is_unknown(live: Live) -> None:
    live.worker.probe_script = lambda _: None
    await upload(live, "a")
    async with live.worker, live.gateway() as plane:
        await eventually(lambda: live.worker.probed)
        for name in ("bot", "bot@1"):
            answer = await plane.complete(name)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert await states(live) == ["proving"]


async def test_at_most_so_many_at_a_time(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "MAX_PROBES", 4)
    live.worker.probe_script = lambda _: None
    await upload(live, *DIGITS)
    async with live.worker, live.gateway():
        await eventually(lambda: len(live.worker.probed) >= 4)
        await asyncio.sleep(0.3)
        assert len(live.worker.probed) == 4


async def test_a_probe_that_takes_long_keeps_its_claim_and_is_one_attempt(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "RENEW_S", 0.05)
    live.worker.probe_script = lambda _: None
    await upload(live, "a")

    async def is_renewed() -> bool:
        rows = await live.fetch(
            "SELECT FROM version_proving WHERE claimed_until > now() + interval '30 seconds'"
        )
        return len(rows) == 1

    async with live.worker, live.gateway():
        await eventually(lambda: live.worker.probed)
        async with live.database.transaction() as connection:
            await connection.execute(
                "UPDATE version_proving SET claimed_until = now() + interval '10 seconds'"
            )
        await eventually(is_renewed)
    (row,) = await live.fetch("SELECT attempts FROM version_proving")
    assert (row["attempts"], len(live.worker.probed)) == (1, 1)


async def test_a_probe_that_is_given_up_is_withdrawn_from_the_worker(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "STALL_S", 0.1)
    live.worker.probe_script = lambda _: None
    await upload(live, "a")
    async with live.worker, live.gateway():
        await eventually(lambda: live.worker.withdrawn)
        assert live.worker.withdrawn[0] == live.worker.probed[0].id
        await eventually(lambda: _detail_like(live, "have not advanced"))


async def test_a_probe_of_a_version_that_is_deleted_is_withdrawn(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "RENEW_S", 0.05)
    live.worker.probe_script = lambda _: None
    await upload(live, "a")
    async with live.worker, live.gateway():
        await eventually(lambda: live.worker.probed)
        async with live.database.transaction() as connection:
            await connection.execute("DELETE FROM adapter_versions")
        await eventually(lambda: live.worker.withdrawn)
    assert len(live.worker.probed) == 1


class Prover:
    """A worker, as far as the choice of one and the patience with it are concerned."""

    def __init__(self, name: str = "") -> None:
        self.instance_id = name
        self.status = self
        self.models = [self]
        self.digest, self.num_proof_steps = "base", 0


async def test_patience_with_a_worker_whose_proofs_advance_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long the probe waits for its turn."""
    monkeypatch.setattr(verification, "STALL_CHECK_S", 0.001)
    worker: Any = Prover()
    async with (
        asyncio.timeout(3600) as patience,
        in_background(verification.prolong(patience, worker, "base")),
    ):
        for _ in range(2):
            before = patience.when()
            await asyncio.sleep(0.05)
            assert patience.when() == before
            worker.num_proof_steps += 1
            await eventually(lambda before=before: patience.when() != before)


def test_a_content_is_tried_again_where_it_was_computed_and_then_elsewhere() -> None:
    workers: Any = [Prover(name) for name in "abc"]

    def chosen(digest: str, attempts: int) -> str:
        claim = verification.Claim("t", "bot", 1, digest, "base", attempts)
        return verification.choose_worker(workers, claim).instance_id

    firsts = [chosen(digit * 64, 1) for digit in DIGITS]
    assert set(firsts) == {"a", "b", "c"}
    for digit, first in zip(DIGITS, firsts, strict=True):
        attempts = [chosen(digit * 64, number) for number in range(1, 10)]
        assert attempts[:3] == [first] * 3
        assert set(attempts) == {"a", "b", "c"}


async def test_what_is_proved_wrong_is_rejected_and_says_what_differed(live: Live) -> None:
    def wrong(probe: Probe) -> ProbeResult:
        if probe.adapter.digest[0] == "b":
            return ProbeResult(probe.id, error="adapter.proof.differs", message="layer 1 q_proj")
        return proved(probe)

    live.worker.probe_script = wrong
    await upload(live, "a", "b", "c")
    async with live.worker, live.gateway():
        await eventually(lambda: _is(live, ["ready", "rejected", "ready"]))
    (row,) = await live.fetch("SELECT error FROM adapter_versions WHERE state = 'rejected'")
    assert set(row["error"]) == {"code", "field", "got", "allowed", "hint"}
    assert row["error"]["code"] == "adapter.proof.differs"
    assert "layer 1 q_proj" in row["error"]["got"]


async def _is(live: Live, wanted: list[str]) -> bool:
    return await states(live) == wanted


async def test_what_could_not_be_proved_is_tried_again(live: Live) -> None:
    def busy_once(probe: Probe) -> ProbeResult:
        if len(live.worker.probed) == 1:
            return ProbeResult(probe.id, error="busy", message="no room", is_final=False)
        return proved(probe)

    live.worker.probe_script = busy_once
    await upload(live, "a")
    async with live.worker, live.gateway():
        await eventually(lambda: live.worker.probed)
        await eventually(lambda: _detail(live, "busy: no room"))
        await eventually(lambda: _is(live, ["ready"]))
    assert len(live.worker.probed) == 2


async def _detail(live: Live, wanted: str) -> bool:
    rows = await live.fetch("SELECT detail FROM version_proving")
    return [row["detail"] for row in rows] in ([wanted], [])


async def test_without_a_worker_it_says_why_and_goes_on_when_one_comes(live: Live) -> None:
    await upload(live, "a")
    async with live.gateway():
        await eventually(lambda: _detail(live, "no worker serves tiny"))
        assert await states(live) == ["proving"]
        async with live.worker:
            await eventually(lambda: _is(live, ["ready"]))


async def test_a_worker_that_dies_while_it_proves_loses_nothing(live: Live) -> None:
    live.worker.probe_script = lambda _: None
    await upload(live, "a")
    async with live.gateway():
        async with live.worker:
            await eventually(lambda: live.worker.probed)
        await eventually(lambda: _detail_like(live, "lost"))
        live.worker.probe_script = proved
        async with live.worker:
            await eventually(lambda: _is(live, ["ready"]))


async def _detail_like(live: Live, part: str) -> bool:
    rows = await live.fetch("SELECT detail FROM version_proving")
    return any(part in (row["detail"] or "") for row in rows)


async def test_gateways_share_the_work_and_take_up_what_another_left(live: Live) -> None:
    """A claim that has run out is anybody's: as that of a gateway which was killed."""
    await upload(live, *DIGITS)
    async with live.database.transaction() as connection:
        assert len(await claim(connection, "gateway-killed", 4)) == 4
        await connection.execute(
            "UPDATE version_proving SET claimed_until = now() - interval '1 second'"
            " WHERE claimed_by IS NOT NULL"
        )
    async with live.worker, live.gateway("gateway-1"), live.gateway("gateway-2"):
        await eventually(lambda: _is(live, ["ready"] * 16))
    assert sorted(probe.adapter.digest[0] for probe in live.worker.probed) == sorted(DIGITS)


async def test_ready_versions_are_proved_for_the_layouts_of_new_workers(live: Live) -> None:
    """One at a time; a content that fails stays ready, and does not hold up the others."""
    await upload(live, "a", "b", "c")
    async with live.database.transaction() as connection:
        for found in await claim(connection):
            await prove(connection, found)

    def script(probe: Probe) -> ProbeResult:
        is_wrong = probe.adapter.digest[0] == "b"
        result = proved(probe)
        return msgspec.structs.replace(result, error="wrong") if is_wrong else result

    live.worker.probe_script = script
    async with live.worker, live.gateway():
        await eventually(lambda: len(live.worker.probed) == 3)
        await eventually(lambda: _has_proofs(live, "ac"))
    assert await states(live) == ["ready"] * 3


async def _has_proofs(live: Live, digits: str) -> bool:
    query = "SELECT digest FROM adapter_proofs WHERE layout = $1 ORDER BY digest"
    return "".join(row["digest"][0] for row in await live.fetch(query, LAYOUT)) == digits


async def test_proofs_that_are_missing_are_not_looked_for_again_and_again(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All versions are gone through for it. Only a change of the catalog makes new ones."""
    monkeypatch.setattr("gateway.control.verification.POLL_INTERVAL_S", 0.2)
    async with PostgresProxy(dsn, tmp_path / "proxy") as proxy:
        database = await Database.connect(proxy.dsn, sees=EVERYTHING)
        live = Live(database, tmp_path)
        await live.prepare()

        def num_looks() -> int:
            return proxy.said.count(LAYOUT.encode())

        async with live.worker, live.gateway():
            await upload(live, "a")
            await eventually(lambda: _has_proofs(live, "a"))

            async def is_over() -> bool:
                before = num_looks()
                await asyncio.sleep(0.6)
                return num_looks() == before

            await eventually(is_over)
            before = num_looks()
            assert before > 0
            await upload(live, "b")
            await eventually(lambda: num_looks() > before)
        await database.close()
