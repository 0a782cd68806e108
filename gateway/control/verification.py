"""Lets a worker verify each adapter version before it is served. A control task of the gateway.

A gateway claims a version in Postgres for a minute, sends a worker a probe (a request to verify the
version), and renews the claim while the probe is in flight. So several gateways share the work, and
others take over the claims of a gateway that was killed. A probe may wait in the worker's queue for
any time while the worker's verifications (proofs) make progress. If there is no progress for
`STALL_S`, the gateway gives up the probe and cancels it at the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec

from adapters.reference import AdapterRef
from gateway.catalog.catalog import Catalog
from gateway.dispatch.fleet import Fleet
from store.database import Database
from store.errors import ApiError
from store.periodic import in_background, repeat
from store.queries import from_row, sql
from workers.wire.client import WorkerClient, WorkerFailed
from workers.wire.frames import ProbeResult
from workers.wire.protocol import ErrorCode

log = logging.getLogger(__name__)

MAX_PROBES = 16
"""Maximum number of versions that this gateway has in verification at a time. A worker verifies all
waiting versions in one pass through the base model."""
POLL_INTERVAL_S = 2.0
RENEW_S = 20.0
"""Seconds between renewals of a claim while its probe is in flight: a third of the claim's
duration."""
STALL_S = 600.0
"""Seconds without progress of the worker's proofs after which a probe is cancelled. One step,
such as one layer for several adapters, may take long if the worker also serves requests."""
STALL_CHECK_S = 1.0
ATTEMPTS_AT_ONE_WORKER = 3
"""Number of attempts at one worker before another worker is tried. A worker keeps the results it
has computed, so repeating an attempt there is cheaper."""
RETRY_S = 60.0
"""Seconds between two attempts to verify a ready version for another worker layout."""


class Claim(msgspec.Struct, frozen=True):
    """Adapter version that this gateway has claimed, so that no other gateway verifies it."""

    tenant_id: str
    name: str
    version: int
    digest: str
    base_digest: str
    attempts: int = 1
    """Number of attempts to verify the version, including this one."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.tenant_id, self.name, self.version

    @property
    def path(self) -> str:
        return f"{self.tenant_id}/{self.name}/{self.version}"


class AdapterVerification:
    """Verifier of new versions, up to `MAX_PROBES` at a time. When no new version waits, it
    verifies ready versions for further layouts of connected workers, one at a time."""

    def __init__(self, database: Database, gateway_id: str, catalog: Catalog, fleet: Fleet) -> None:
        self._database = database
        self._id = gateway_id
        self._catalog = catalog
        self._fleet = fleet
        self._wake = asyncio.Event()
        self._probing: set[asyncio.Task[None]] = set()
        self._not_before: dict[str, float] = {}
        """Earliest time of the next attempt to verify each version for another layout, by
        `Claim.path`."""
        self._complete: object = None
        """State in which the last search found no version to verify: catalog generation, layouts,
        and recently attempted versions. The search is repeated only after a change of state."""
        catalog.watch(lambda _: self._wake.set())

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            await repeat("adapters are not proved", self._look, POLL_INTERVAL_S, self._wake)
        finally:
            for task in self._probing:
                task.cancel()

    async def _look(self) -> None:
        served = {digest for c in self._fleet.clients if c.is_ready for digest in c.models}
        num_free = MAX_PROBES - len(self._probing)
        if num_free == 0:
            return
        async with self._database.acquire() as connection:
            await connection.execute(sql["proving_unserved"], sorted(served))
            rows = await connection.fetch(sql["proving_claim"], self._id, sorted(served), num_free)
        for row in rows:
            self._start(self._prove(from_row(Claim, row)))
        if not self._probing:
            await self._prove_further()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._probing.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._probing.discard(task)
        self._wake.set()

    async def _prove(self, claim: Claim) -> None:
        """Verifies a version, and marks it in the database as ready or rejected, or releases the
        claim for another attempt. If the database is unavailable, the claim expires."""
        adapter = AdapterRef(claim.digest, f"{claim.name}@{claim.version}")
        try:
            try:
                async with asyncio.timeout(None) as held, in_background(self._renew(claim, held)):
                    able = self._fleet.serving(claim.base_digest)
                    worker, result = await self._probe(able, claim, adapter)
            except TimeoutError:
                log.info("%s of %s: the claim is lost", adapter.name, claim.tenant_id)
                return
            async with self._database.acquire() as connection:
                if not result.error:
                    proof = (result.layout, result.checksum, result.fingerprint, worker)
                    await connection.fetchval(sql["proving_ready"], *claim.key, *proof)
                elif result.is_final:
                    log.warning("%s of %s: %s", adapter.name, claim.tenant_id, result.message)
                    why = _rejection(result)
                    await connection.fetchval(sql["proving_rejected"], *claim.key, why)
                else:
                    why = f"{result.error}: {result.message}"
                    await connection.execute(sql["proving_release"], *claim.key, self._id, why)
        except ApiError as error:
            log.warning("%s of %s: %s", adapter.name, claim.tenant_id, error)

    async def _renew(self, claim: Claim, held: asyncio.Timeout) -> None:
        """Renews the claim until cancelled. Makes the timeout `held` expire if the claim is lost,
        because the version was deleted or another gateway has claimed it."""
        while True:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(ApiError):
                async with self._database.acquire() as connection:
                    is_held: bool | None = await connection.fetchval(
                        sql["proving_renew"], *claim.key, self._id
                    )
                if not is_held:
                    held.reschedule(0)
                    return

    async def _prove_further(self) -> None:
        now = asyncio.get_running_loop().time()
        self._not_before = {d: at for d, at in self._not_before.items() if at > now}
        able: dict[tuple[str, str], list[WorkerClient]] = {}
        for client in self._fleet.clients:
            for base, model in client.models.items() if client.is_ready else ():
                able.setdefault((model.adapter_layout, base), []).append(client)
        view = self._catalog.view
        looked_at = (view and view.generation, frozenset(able), frozenset(self._not_before))
        if looked_at == self._complete:
            return
        async with self._database.acquire() as connection:
            for (layout, base), clients in able.items():
                row = await connection.fetchrow(
                    sql["proofs_missing"], layout, base, list(self._not_before), 1
                )
                if row is not None:
                    self._start(self._prove_ready(clients, from_row(Claim, row)))
                    return
        self._complete = looked_at

    async def _prove_ready(self, able: list[WorkerClient], claim: Claim) -> None:
        """Verifies a ready version for another worker layout. The version stays ready if this
        fails."""
        self._not_before[claim.path] = asyncio.get_running_loop().time() + RETRY_S
        worker, result = await self._probe(able, claim, AdapterRef(claim.digest))
        if result.error:
            log.warning("%s on %s: %s", claim.path, worker, result.message)
            return
        proof = (result.layout, result.checksum, result.fingerprint, worker)
        try:
            async with self._database.acquire() as connection:
                await connection.execute(sql["proof_insert"], *claim.key, claim.base_digest, *proof)
        except ApiError as error:
            log.warning("%s: %s", claim.path, error)

    async def _probe(
        self, able: list[WorkerClient], claim: Claim, adapter: AdapterRef
    ) -> tuple[str, ProbeResult]:
        """Probes the adapter on one of the workers, and returns the worker's id and the result of
        the probe. If there is no worker, or it does not answer, returns a result with an error that
        is not final."""
        base = claim.base_digest
        worker = ""
        try:
            if not able:
                raise WorkerFailed(ErrorCode.WORKER_LOST, "no worker is ready")
            client = choose_worker(able, claim)
            worker = client.instance_id
            async with (
                asyncio.timeout(STALL_S) as patience,
                in_background(prolong(patience, client, base)),
            ):
                return worker, await client.probe(base, adapter)
        except WorkerFailed as error:
            why = error.message
        except TimeoutError:
            why = f"the worker's proofs have not advanced for {STALL_S:.0f} s"
        return worker, ProbeResult(
            0, error="adapter.probe.unavailable", message=why, is_final=False
        )


def choose_worker(able: list[WorkerClient], claim: Claim) -> WorkerClient:
    """Returns the worker that verifies the claimed version. Attempts with the same adapter content
    go to the same worker, because a worker keeps the results that it has computed. After every
    `ATTEMPTS_AT_ONE_WORKER` attempts, the next worker is chosen."""

    def rank(client: WorkerClient) -> bytes:
        return hashlib.sha256(f"{claim.digest} {client.instance_id}".encode()).digest()

    turn = (claim.attempts - 1) // ATTEMPTS_AT_ONE_WORKER
    return sorted(able, key=rank)[turn % len(able)]


async def prolong(patience: asyncio.Timeout, client: WorkerClient, base: str) -> None:
    """Extends the timeout `patience` whenever the worker's proofs for the base model advance, until
    cancelled."""
    seen = _num_proof_steps(client, base)
    while True:
        await asyncio.sleep(STALL_CHECK_S)
        now = _num_proof_steps(client, base)
        if now != seen and not patience.expired():
            seen = now
            patience.reschedule(asyncio.get_running_loop().time() + STALL_S)


def _num_proof_steps(client: WorkerClient, base: str) -> int:
    """Returns the number of proof steps for the base model that the worker has reported."""
    models = () if client.status is None else client.status.models
    return next((model.num_proof_steps for model in models if model.digest == base), 0)


def _rejection(result: ProbeResult) -> dict[str, Any]:
    return {
        "code": result.error,
        "field": "adapter_model.safetensors",
        "got": result.message,
        "allowed": None,
        "hint": "Check the adapter with peft on the same base model, and upload it again.",
    }
