"""Defines the metrics of a gateway. The readers that export them are set up elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from gateway.error_codes import CODES
from gateway.quota_types import Kind
from store.gateway_load import LastError
from store.records import Tenant
from telemetry.tallies import OTLP_ALONE, Counter, Figures, Gauge, Histogram, ReadCounter
from telemetry.top_use import TopUse

MAX_CODES = 16
REQUEST = ("model_name", "class")
"""Labels of metrics of requests: the base model's name and the service class."""
LATENCY_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 320, 640),
)
RENEWAL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class LastErrors:
    """Last failure of each error code, for at most `MAX_CODES` codes. Not thread-safe."""

    def __init__(self) -> None:
        self._by_code: dict[str, LastError] = {}
        """Last failures by code, the newest one at the end."""

    def note(self, code: str, request_id: str) -> None:
        earlier = self._by_code.pop(code, None)
        number = 1 + (earlier.number if earlier else 0)
        self._by_code[code] = LastError(code, time.time(), request_id, number)
        if len(self._by_code) > MAX_CODES:
            del self._by_code[next(iter(self._by_code))]

    def newest_first(self) -> list[LastError]:
        return list(self._by_code.values())[::-1]


refusals = Counter(
    "loraplex_refusals",
    "Answers with a status of 400 or more, by `reason`, the error's code.",
    ("reason",),
    expected=CODES,
)
refused_bytes = Counter(
    "loraplex_refused_bytes",
    "Bytes of the bodies of refused requests of tenants, read or discarded.",
)
connections_refused = Counter(
    "loraplex_connections_refused",
    "Connections that the server closed of its own accord, by `reason`.",
    ("reason",),
)
requests = Counter(
    "loraplex_requests",
    "Requests that a worker had begun and that ended, by `status`.",
    (*REQUEST, "status"),
)
tokens = Counter(
    "loraplex_tokens",
    "Tokens used, by `kind`: prompt, cached (a part of prompt) or completion.",
    (*REQUEST, "kind"),
)
request_duration = Histogram(
    "loraplex_request_duration_seconds",
    "Time from the first byte of a request to the end of its answer.",
    *(LATENCY_BUCKETS, REQUEST),
)
time_to_first_token = Histogram(
    "loraplex_time_to_first_token_seconds",
    "Time from the first byte of a request to its first token at the gateway.",
    *(LATENCY_BUCKETS, REQUEST),
)
time_per_output_token = Histogram(
    "loraplex_time_per_output_token_seconds",
    "Mean time between the tokens of a request, all its choices together.",
    *(LATENCY_BUCKETS, REQUEST),
)

PROVIDER = "loraplex"
"""Value of the attribute `gen_ai.provider.name` of spans and metrics."""
GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "error.type")
DOUBLING_BUCKETS = tuple(0.01 * 2**power for power in range(14))
server_duration = Histogram(
    "gen_ai.server.request.duration",
    "Time from the first byte of a request to the end of its answer.",
    *(DOUBLING_BUCKETS, GEN_AI),
    registry=OTLP_ALONE,
)
server_first_token = Histogram(
    "gen_ai.server.time_to_first_token",
    "Time from the first byte of a request that succeeded to its first token.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    GEN_AI,
    registry=OTLP_ALONE,
)
server_per_token = Histogram(
    "gen_ai.server.time_per_output_token",
    "Mean time of a token after the first, of requests that succeeded.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5),
    GEN_AI,
    registry=OTLP_ALONE,
)
"""The histograms `server_*` follow the GenAI conventions, and are exported only over OTLP.
`/metrics` has the same values in loraplex's own histograms, by service class.

https://github.com/open-telemetry/semantic-conventions-genai"""
lease_renewal = Histogram(
    "loraplex_lease_renewal_seconds",
    "Time of the database for a renewal of the leases of limits.",
    RENEWAL_BUCKETS,
)
lease_failures = Counter(
    "loraplex_lease_renewal_failures", "Renewals that the database did not answer."
)
limit_refusals = Counter(
    "loraplex_limit_refusals",
    "Requests refused for a limit of their tenant or key, by `limit`.",
    ("limit",),
    expected=Kind,
)
limit_waits = Counter(
    "loraplex_limit_waits",
    "Requests that waited for a renewal of the leases of limits, or behind others.",
)
tenant_use = TopUse(
    [
        ("loraplex_tenant_tokens", "Prompt and completion tokens of a tenant."),
        (
            "loraplex_tenant_requests",
            "Requests of a tenant that a worker had begun and that ended.",
        ),
        ("loraplex_tenant_cost", "Dollars that requests of a tenant cost by its prices."),
        ("loraplex_tenant_refusals", "Answers to a tenant with a status of 400 or more."),
    ],
    ("tenant",),
)
adapter_use = TopUse(
    [
        ("loraplex_adapter_tokens", "Prompt and completion tokens of a version of an adapter."),
        (
            "loraplex_adapter_requests",
            "Requests of a version that a worker had begun and that ended.",
        ),
    ],
    ("tenant", "adapter", "version"),
)
last_errors = LastErrors()


class GatewayState(NamedTuple):
    """Current state of a gateway."""

    requests_in_flight: int
    catalog_age_s: float
    catalog_generation: int
    usage_log_bytes: int
    max_usage_log_bytes: int
    clock_difference_s: float
    workers: dict[str, int]
    """Number of workers by state. Workers that are not connected are included."""
    moves: dict[str, int]
    """Number of sequences that were moved to another worker (`retried`, `resumed`) or presumed to
    crash workers (`poisonous`) since the process started."""
    tenants: Mapping[str, Tenant]
    """Tenants of the catalog by id."""


_state: Callable[[], GatewayState] | None = None
_unread_answers: Callable[[], int] | None = None


def show(state: Callable[[], GatewayState]) -> None:
    """Sets the function from which the gauges read the state of the process's gateway."""
    global _state
    _state = state


def show_unread_answers(num_bytes: Callable[[], int]) -> None:
    """Sets the function from which a gauge reads the bytes of answers that are not read yet."""
    global _unread_answers
    _unread_answers = num_bytes


def _read(read: Callable[[GatewayState], Figures]) -> Callable[[], Figures]:
    """Returns a function that reads the figures of the gateway, if the process has one."""
    return lambda: () if _state is None else read(_state())


def _gauge(name: str, description: str, read: Callable[[GatewayState], float]) -> None:
    Gauge(name, description, _read(lambda state: [(read(state), {})]))


_gauge("loraplex_requests_in_flight", "Requests in flight.", lambda s: s.requests_in_flight)
_gauge(
    "loraplex_catalog_age_seconds",
    "Time since the catalog was last confirmed to be the newest. 0 if it is.",
    lambda s: s.catalog_age_s,
)
_gauge(
    "loraplex_catalog_generation",
    "Generation of the catalog in use.",
    lambda s: s.catalog_generation,
)
_gauge(
    "loraplex_usage_log_bytes",
    "Usage waiting for the database.",
    lambda s: s.usage_log_bytes,
)
_gauge(
    "loraplex_usage_log_max_bytes",
    "Size of the usage log above which requests are refused.",
    lambda s: s.max_usage_log_bytes,
)
_gauge(
    "loraplex_database_clock_difference_seconds",
    "Time by which the machine's clock is ahead of the database's, which limits and keys follow.",
    lambda s: s.clock_difference_s,
)
Gauge(
    "loraplex_workers",
    "Workers by `state`: ready, silent, draining, lost, or absent (an address that "
    "has never answered).",
    _read(lambda s: [(number, {"state": state}) for state, number in s.workers.items()]),
)


def _names(state: GatewayState) -> Iterator[tuple[float, dict[str, str]]]:
    """Yields a 1, labelled with id and name, for each tenant in `tenant_use`."""
    for (tenant_id,) in tenant_use.totals():
        if (tenant := state.tenants.get(tenant_id)) is not None:
            yield 1, {"tenant": tenant_id, "name": tenant.name}


Gauge(
    "loraplex_tenant_info",
    "Always 1. The `name` of each `tenant` of the other metrics, to join by.",
    _read(_names),
)
ReadCounter(
    "loraplex_moves",
    "Sequences moved to another worker (`kind` retried or resumed), or refused as the"
    " cause of lost workers (poisonous).",
    _read(lambda s: [(number, {"kind": kind}) for kind, number in s.moves.items()]),
)
Gauge(
    "loraplex_unread_answer_bytes",
    "Bytes of answers that clients have not read yet, and bytes reserved for whole answers.",
    lambda: () if _unread_answers is None else [(_unread_answers(), {})],
)
