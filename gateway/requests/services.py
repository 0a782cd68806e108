"""Services that the handlers use. A gateway process has one of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway import telemetry
from gateway.catalog.catalog import Catalog, Principal, SnapshotSource, is_valid
from gateway.config import GatewayConfig
from gateway.dispatch.failover import Failover
from gateway.dispatch.fleet import NONE_SERVES, Fleet
from gateway.dispatch.in_flight import InFlightRequests
from gateway.limits.admission import Admission
from gateway.limits.database_clock import DatabaseClock
from gateway.limits.leases import Leases, PostgresLeaseRenewal
from gateway.limits.tenant_load import BodyPace, RefusalLimit
from gateway.metering.canary_outcomes import Outcomes
from gateway.metering.wal import WriteAheadLog
from gateway.telemetry import GatewayState
from gateway.text.grammars import Grammars
from gateway.text.tokenizer import Tokenizers
from store.database import Database
from store.key_uses import KeyUses
from web.refused_keys import RefusedKeys
from workers.wire.client import WorkerClient


class GatewayRefusals:
    """Counter of the requests and connections that a server with the data plane refuses."""

    def add_answer(self, scope: Mapping[str, Any], status: int, reason: str) -> None:
        telemetry.refusals.add(1, reason)
        if isinstance(caller := scope.get("user"), Principal):
            telemetry.tenant_use.add((caller.tenant.id,), 0, 0, 0, 1)
        if status >= 500:
            telemetry.last_errors.note(reason, scope["state"].get("request_id", ""))

    def add_connection(self, reason: str) -> None:
        telemetry.connections_refused.add(1, reason)


class Gateway:
    """Services of one gateway process, created once. `gateway.app` runs their background tasks."""

    def __init__(
        self,
        config: GatewayConfig,
        source: SnapshotSource,
        clients: Sequence[WorkerClient],
        database: Database | None,
    ) -> None:
        self.config = config
        self.clock = DatabaseClock(config.clock)
        self.catalog = Catalog(source, config.catalog_stale_s)
        self.tokenizers = Tokenizers(config.model_folder)
        self.grammars = Grammars()
        self.leases: Leases | None = None
        if database is not None:
            renewal = PostgresLeaseRenewal(database, config.catalog_stale_s, self.clock)
            self.leases = leases = Leases(
                renewal,
                config.instance_id,
                config.catalog_stale_s,
                self.clock,
                wait_s=config.limits_wait_s,
            )
            self.catalog.watch(lambda _: leases.believe_catalog())
        self.refusals = RefusalLimit(config.tenant_refusals_per_minute)
        self.admission = Admission(self.leases, self.refusals)
        self.body_pace = BodyPace()
        self.fleet = Fleet(clients, self._connect)
        self.failover = Failover(self.fleet, config.failover_wait_s)
        self.in_flight_requests = InFlightRequests(Outcomes(), self._is_valid)
        self.key_uses = KeyUses()
        self.refused_keys = RefusedKeys(config.instance_id, config.pepper)
        self.wal = WriteAheadLog(config.wal, config.instance_id, max_bytes=config.max_wal_bytes)
        self.catalog.watch(self.fleet.follow)

    @property
    def state(self) -> GatewayState:
        """Current state for the metrics. May be read in any thread."""
        view, failover = self.catalog.view, self.failover
        return GatewayState(
            requests_in_flight=len(self.in_flight_requests.open),
            catalog_age_s=self.catalog.unconfirmed_s,
            catalog_generation=0 if view is None else view.generation,
            usage_log_bytes=self.wal.num_bytes,
            max_usage_log_bytes=self.config.max_wal_bytes,
            clock_difference_s=self.clock.difference_s,
            workers=self.fleet.states(),
            moves={
                "retried": failover.num_retried,
                "resumed": failover.num_resumed,
                "poisonous": failover.num_poisonous,
            },
            tenants={} if view is None else view.tenants,
        )

    def why_not_ready(self) -> str | None:
        """Returns the reason why requests cannot be served, or None."""
        if self.catalog.view is None:
            return "the catalog is not loaded"
        if self.catalog.is_stale:
            return "the catalog is stale: the database does not answer"
        reason = self.wal.why_unavailable() or self.fleet.why_not_serving()
        # An empty installation serves all that it has.
        is_empty = reason == NONE_SERVES and not self.catalog.view.models
        return None if is_empty else reason

    def _is_valid(self, key_id: str) -> bool:
        view = self.catalog.view
        return view is not None and is_valid(view, key_id, self.clock.moment)

    def _connect(self, address: str) -> WorkerClient:
        """Returns a client of the worker. The client does not connect yet."""
        config = self.config
        return WorkerClient(address, instance_id=config.instance_id, security=config.security)
