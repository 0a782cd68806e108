"""Creates the data plane, as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from gateway import telemetry
from gateway.catalog.catalog import SnapshotSource
from gateway.config import GatewayConfig
from gateway.control.tasks import ControlTasks
from gateway.http.routes import answers, models, public, tokens
from gateway.http.routing import CrossOrigin, DataPlane
from gateway.requests.services import Gateway
from store.database import Database
from store.periodic import repeat
from workers.wire.client import WorkerClient

ROUTES = [
    answers.create_chat_completion,
    answers.create_completion,
    answers.create_response,
    answers.create_embeddings,
    answers.embed,
    answers.create_scores,
    answers.rerank,
    answers.create_message,
    tokens.count_message_tokens,
    models.list_models,
    models.get_model,
    tokens.tokenize,
    tokens.detokenize,
    public.livez,
    public.readyz,
    public.get_version,
    public.welcome,
]

START_WAIT_S = 2.0
"""Maximum seconds that the application's startup waits for the first catalog. After that, the port
is opened without a catalog, so that the health routes can report this."""
WAL_CHECK_S = 5.0
"""Seconds between checks that the usage log can be written."""


@asynccontextmanager
async def _running(
    gateway: Gateway, control: ControlTasks | None, documents: public.Documents
) -> AsyncGenerator[None, None]:
    """Runs the background tasks of a gateway while the application serves requests. Waits up to
    START_WAIT_S for the first catalog before the port is opened, so that the first clients are not
    refused."""
    await gateway.wal.open()
    await asyncio.to_thread(documents.write)
    telemetry.show(lambda: gateway.state)
    works = [
        gateway.fleet.run(),
        *([] if control is None else [control.run()]),
        _follow_catalog(gateway, control),
        gateway.in_flight_requests.run(),
        repeat("usage cannot be written", gateway.wal.check, WAL_CHECK_S),
    ]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(each) for each in works]
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_WAIT_S):
                    await gateway.catalog.loaded.wait()
            yield
        finally:
            for task in running:
                task.cancel()
    await asyncio.to_thread(gateway.grammars.close)
    await asyncio.to_thread(gateway.tokenizers.close)
    if control is not None:
        await control.leave()
    await gateway.wal.close()


async def _follow_catalog(gateway: Gateway, control: ControlTasks | None) -> None:
    """Follows the catalog once the first heartbeat is written. The heartbeat must be written before
    this gateway uses any adapter version."""
    if control is not None:
        await control.has_joined.wait()
    await gateway.catalog.run()


def create_app(
    config: GatewayConfig,
    *,
    source: SnapshotSource,
    clients: Sequence[WorkerClient],
    database: Database | None = None,
    document_beside: public.Json | None = None,
) -> DataPlane:
    """Creates the data plane. `source` yields the catalog's snapshots. `clients` are the clients of
    the workers in the settings, which are not connected yet. Registered workers are found in the
    catalog. Without a database, no report is written, no adapter is verified, no canary is rolled
    back, and usage stays in the write-ahead log. `document_beside` is the OpenAPI document of
    routes that another application serves on the same port."""
    gateway, control = Gateway(config, source, clients, database), None
    if database is not None and gateway.leases is not None:
        control = ControlTasks(
            database,
            config.instance_id,
            gateway.catalog,
            gateway.fleet,
            gateway.in_flight_requests,
            gateway.key_uses,
            gateway.refused_keys,
            gateway.wal,
            gateway.leases,
        )
    documents = public.Documents(ROUTES, document_beside)
    return DataPlane(
        gateway,
        [*ROUTES, *documents.routes],
        partial(_running, gateway, control, documents),
        CrossOrigin(config.cors_origins) if config.cors_origins else None,
    )
