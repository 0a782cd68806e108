"""What workers hear besides requests: what to bring nearer, what to keep, and the checksums."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from gateway.dispatch.fleet import NONE_SERVES
from gateway.dispatch.run import Work
from gateway.exceptions import NoWorker
from store.records import AdapterProof, CatalogSnapshot
from tests.gateway.scripts import ids
from tests.gateway.service import Service, snapshot
from tests.scripted_worker import DIGEST, LAYOUT, ScriptedWorker
from workers.wire.frames import Desired
from workers.wire.protocol import Generate, SequenceOutput
from workers.wire.status import UNSATISFIABLE, AdapterStatus, ModelStatus

SEVEN, THREE = "ten_acme-support-bot-7", "ten_acme-support-bot-3"
PROOFS = (
    AdapterProof(SEVEN, DIGEST, LAYOUT, "c" * 64),
    AdapterProof(SEVEN, DIGEST, "another layout", "d" * 64),
    AdapterProof(SEVEN, "another base", LAYOUT, "e" * 64),
)


def catalog(service: Service, generation: int, **pinned: dict[int, int] | None) -> CatalogSnapshot:
    """acme's `support-bot` with pinned aliases, {alias: canary}."""
    plain = snapshot(service.keys.records, generation=generation)
    aliases = tuple(
        msgspec.structs.replace(a, pinned=True, canary=pinned[a.alias])
        if a.tenant_id == "ten_acme" and a.alias in pinned
        else a
        for a in plain.aliases
    )
    return msgspec.structs.replace(plain, aliases=aliases, proofs=PROOFS)


def serve(service: Service, catalog: CatalogSnapshot) -> None:
    service.feed(catalog)


@pytest.fixture(scope="module")
def service(store: Path) -> Iterator[Service]:
    service = Service(store)
    service.start()
    serve(service, catalog(service, 2))
    yield service
    service.stop()


def test_the_checksum_is_that_of_the_worker_s_layout(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    for model, checksum in (("support-bot", "c" * 64), ("support-bot@3", "")):
        client.completions.create(model=model, prompt="Hi")
        adapter = worker.requests[-1].adapter
        assert adapter is not None and adapter.checksum == checksum


def test_the_adapter_is_fetched_before_the_prompt_is_read(
    service: Service, client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    worker.prefetched.clear()
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="support-bot", prompt="long" * 100)
    service.wait_for(lambda: len(worker.prefetched) == 1)
    assert (worker.prefetched[0].digest, worker.prefetched[0].checksum) == (SEVEN, "c" * 64)
    client.completions.create(model="tiny", prompt="Hi")
    assert len(worker.prefetched) == 1


def test_what_is_on_the_device_is_not_fetched(
    service: Service, client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    service.call(lambda: worker.report(AdapterStatus(SEVEN, "device", 1, 0, False)))
    service.wait_for(lambda: bool(service.gateway.fleet.clients[0].status))
    worker.prefetched.clear()
    client.completions.create(model="support-bot", prompt="Hi")
    client.completions.create(model="support-bot@3", prompt="Hi")
    assert [adapter.digest for adapter in worker.prefetched] == [THREE]
    before = service.gateway.fleet.clients[0].status
    service.call(lambda: worker.report(AdapterStatus(SEVEN, "host", 1, 0, False)))
    service.wait_for(lambda: service.gateway.fleet.clients[0].status is not before)
    client.completions.create(model="support-bot", prompt="Hi")
    assert [adapter.digest for adapter in worker.prefetched] == [THREE, SEVEN]


def test_workers_hear_what_is_pinned(service: Service, worker: ScriptedWorker) -> None:
    """All versions of a canary set, once each, at every change and after every reconnect."""
    serve(service, catalog(service, 5, prod={7: 9, 3: 1}, staging=None))
    service.wait_for(lambda: worker.desired[-1].generation == 5)
    assert pins(worker.desired[-1]) == {(DIGEST, SEVEN, "c" * 64), (DIGEST, THREE, "")}
    assert len(worker.desired[-1].pins) == 2
    serve(service, catalog(service, 6, staging=None))
    service.wait_for(lambda: worker.desired[-1].generation == 6)
    assert pins(worker.desired[-1]) == {(DIGEST, THREE, "")}
    serve(service, catalog(service, 7))
    service.wait_for(lambda: worker.desired[-1].generation == 7)
    assert worker.desired[-1].pins == []
    worker.desired.clear()
    service.await_in_loop(worker.stop)
    service.await_in_loop(worker.start)
    service.wait_for(lambda: bool(worker.desired) and worker.desired[-1].generation == 7)


def pins(desired: Desired) -> set[tuple[str, str, str]]:
    return {(pin.model, pin.adapter.digest, pin.adapter.checksum) for pin in desired.pins}


async def endless_after_a_token(request: Generate) -> AsyncIterator[SequenceOutput]:
    yield SequenceOutput(id=request.id, tokens=ids("a"))
    await asyncio.sleep(3600)


def test_requests_are_counted_by_version_while_they_run(
    service: Service, client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    worker.script = endless_after_a_token
    in_flight_requests = service.gateway.in_flight_requests.by_version
    streams: list[Any] = [
        client.completions.create(model=model, prompt="Hi", stream=True, max_tokens=100)
        for model in ("support-bot", "support-bot@7", "support-bot@staging", "tiny")
    ]
    assert in_flight_requests == {"ten_acme/support-bot/7": 2, "ten_acme/support-bot/3": 1}
    streams[0].close()
    service.wait_for(lambda: in_flight_requests["ten_acme/support-bot/7"] == 1)
    for stream in streams[1:]:
        stream.close()
    service.wait_for(lambda: not in_flight_requests)


def test_a_request_that_finds_no_worker_is_over(service: Service, client: openai.OpenAI) -> None:
    """Of the base model that is elsewhere: no adapter, no count, and nothing to fetch."""
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="elsewhere", prompt="Hi")
    with pytest.raises(NoWorker):
        service.call(lambda: service.gateway.fleet.choose(Work("e" * 64, None, [], 1)))


def test_a_gateway_is_ready_once_a_worker_serves_a_model(
    service: Service, worker: ScriptedWorker
) -> None:
    """Or if there is no base model that a worker could serve."""
    models, told = worker.models, service.gateway.fleet.clients[0]
    url = f"{service.url}/readyz"
    try:
        service.call(worker.offer)
        service.wait_for(lambda: not told.models)
        ready = httpx.get(url)
        assert (ready.status_code, ready.json()["reason"]) == (503, NONE_SERVES)
        full = catalog(service, service.gateway.catalog.current.generation + 1)
        serve(service, msgspec.structs.replace(full, models=(), versions=(), aliases=()))
        service.wait_for(lambda: not service.gateway.catalog.current.models)
        assert httpx.get(url).status_code == 200
        serve(service, msgspec.structs.replace(full, generation=full.generation + 1))
        service.wait_for(lambda: bool(service.gateway.catalog.current.models))
        assert httpx.get(url).status_code == 503
    finally:
        service.call(lambda: worker.offer(*models))
        service.wait_for(lambda: bool(told.models))
    assert httpx.get(url).status_code == 200


def test_a_model_that_no_worker_can_ever_serve_is_refused_for_good(
    service: Service, client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    """The answer says why, and that waiting does not help; the gateway is not ready."""
    models = worker.models
    reason = "needs 1.20 GiB, the worker's device_memory is 1.00 GiB"
    status = ModelStatus(DIGEST, "tiny", *[0] * 8, tier=UNSATISFIABLE, error=reason)
    told = service.gateway.fleet.clients[0]
    service.call(worker.offer)
    service.wait_for(lambda: not told.models)
    with pytest.raises(openai.InternalServerError) as waiting:
        client.with_options(max_retries=0).completions.create(model="tiny", prompt="Hi")
    assert waiting.value.response.headers["retry-after"] == "2"
    try:
        service.call(lambda: worker.report(models=[status]))
        service.wait_for(lambda: told.status is not None and bool(told.status.models))
        with pytest.raises(openai.InternalServerError, match=reason) as refused:
            client.completions.create(model="tiny", prompt="Hi")
        answer = refused.value.response
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_unsatisfiable"
        assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers
        ready = httpx.get(f"{service.url}/readyz")
        assert ready.status_code == 503 and reason in ready.json()["reason"]
        other = msgspec.structs.replace(status, digest="0" * 64, tier="cold")
        service.call(lambda: worker.report(models=[status, other]))
        service.wait_for(lambda: told.status is not None and len(told.status.models) == 2)
        ready = httpx.get(f"{service.url}/readyz")
        assert (ready.status_code, ready.json()["reason"]) == (503, NONE_SERVES)
    finally:
        service.call(lambda: worker.offer(*models))
        service.call(worker.report)
        service.wait_for(lambda: bool(told.models) and not (told.status and told.status.models))
