"""`make dashboards`: writes the Grafana dashboards and the alert rules in k8s/dashboards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FOLDER = Path(__file__).parents[1] / "k8s" / "dashboards"
RUNBOOK = "docs/operate/alerts.md"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8
STAT_WIDTH, STAT_HEIGHT = 4, 4
ROW_WIDTH = 24
TOKENS = "suffix: tokens/s"
WINDOW = "$__rate_interval"


class Panel(NamedTuple):
    title: str
    unit: str
    """Grafana's id of the unit, such as `reqps`."""
    queries: dict[str, str]
    """PromQL queries by legend."""
    about: str
    """Description of the panel, which Grafana shows next to the title."""
    kind: str = "timeseries"


class Alert(NamedTuple):
    name: str
    severity: str
    expression: str
    minutes: int
    """Minutes for which the expression must hold before the alert fires."""
    summary: str


JOBS = "loraplex.*"
"""Pattern of the scrape jobs of gateways, admin planes and workers. Queries are restricted to these
jobs, because other programs export metrics with the same names."""
_SELECTOR = re.compile(r"\b((?:loraplex_|vllm:|process_)\w+)(?:\{([^}]*)\})?")


def of_jobs(jobs: str, expression: str) -> str:
    """Restricts each selector of a query to the scrape jobs that match a pattern."""

    def restricted(found: re.Match[str]) -> str:
        matchers = [f'job=~"{jobs}"', *filter(None, [found[2]])]
        return f"{found[1]}{{{', '.join(matchers)}}}"

    return _SELECTOR.sub(restricted, expression)


def rate(metric: str, by: str = "", matching: str = "") -> str:
    return f"sum{by and f' by ({by})'} (rate({metric}{matching}[{WINDOW}]))"


def quantile(q: float, histogram: str, by: str = "model_name", matching: str = "") -> str:
    inner = rate(f"{histogram}_bucket", f"le, {by}", matching)
    return f"histogram_quantile({q}, {inner})"


def quantiles(histogram: str, by: str = "model_name", matching: str = "") -> dict[str, str]:
    return {
        f"p{round(100 * q)} {{{{{by}}}}}": quantile(q, histogram, by, matching)
        for q in (0.5, 0.95, 0.99)
    }


def stat(title: str, unit: str, query: str, about: str) -> Panel:
    return Panel(title, unit, {title: query}, about, "stat")


GATEWAY = '{model_name=~"$model"}'
RENEWAL = "loraplex_lease_renewal_seconds"
TTFT = "loraplex_time_to_first_token_seconds"
SERVICE = (
    stat(
        "Requests",
        "reqps",
        rate("loraplex_requests_total", "", GATEWAY),
        "Requests that a worker had begun and that ended.",
    ),
    stat(
        "Output",
        TOKENS,
        rate("loraplex_tokens_total", "", '{model_name=~"$model", kind="completion"}'),
        "Tokens generated for clients.",
    ),
    stat(
        "First token, p95",
        "s",
        f"histogram_quantile(0.95, {rate(f'{TTFT}_bucket', 'le', GATEWAY)})",
        "Of all classes, from a request's first byte to its first token at the gateway.",
    ),
    stat(
        "Failed",
        "percentunit",
        "("
        + rate("loraplex_requests_total", "", '{model_name=~"$model", status="failed"}')
        + f" or vector(0)) / {rate('loraplex_requests_total', '', GATEWAY)}",
        "Part of the requests that failed after a worker had begun them.",
    ),
    stat(
        "Refused",
        "reqps",
        rate("loraplex_refusals_total"),
        "Answers with a status of 400 or more, for any reason.",
    ),
    stat(
        "Workers ready",
        "short",
        'max(loraplex_workers{state="ready"})',
        "As the gateway that has most of them sees it.",
    ),
    Panel(
        "Requests by status",
        "reqps",
        {"{{status}}": rate("loraplex_requests_total", "status", GATEWAY)},
        "How requests ended that a worker had begun; cancelled: the client left.",
    ),
    Panel(
        "Refusals by reason",
        "reqps",
        {"{{reason}}": rate("loraplex_refusals_total", "reason")},
        "By the error's code: a client's mistakes, limits, and overload or lack of workers (503).",
    ),
    Panel(
        "Tokens by kind",
        TOKENS,
        {"{{kind}}": rate("loraplex_tokens_total", "kind", GATEWAY)},
        "Cached tokens are a part of the prompts' tokens.",
    ),
    Panel(
        "Time to first token, at the gateway",
        "s",
        quantiles(TTFT, "class", GATEWAY),
        "What clients wait. Compare with the time in the queue on fairness and overload.",
    ),
    Panel(
        "Mean time between tokens of a request",
        "s",
        quantiles("loraplex_time_per_output_token_seconds", "class", GATEWAY),
        "The pace at which answers are read, one mean a request.",
    ),
    Panel(
        "Duration of requests",
        "s",
        quantiles("loraplex_request_duration_seconds", "class", GATEWAY),
        "From the first byte of a request to the end of its answer.",
    ),
    Panel(
        "Time between two tokens, at the worker",
        "s",
        quantiles("vllm:inter_token_latency_seconds", "model_name", GATEWAY),
        "Each gap counts: pauses that a mean hides show here.",
    ),
    Panel(
        "Running and waiting",
        "short",
        {
            "running {{model_name}}": f"sum by (model_name) (vllm:num_requests_running{GATEWAY})",
            "waiting {{model_name}}": f"sum by (model_name) (vllm:num_requests_waiting{GATEWAY})",
            "in flight": "sum(loraplex_requests_in_flight)",
        },
        "Sequences at the workers, and requests in the gateways.",
    ),
    Panel(
        "Workers by state",
        "short",
        {"{{state}}": "max by (state) (loraplex_workers)"},
        "Silent or lost ones do not answer a gateway.",
    ),
    Panel(
        "Time of steps by part",
        "percentunit",
        {"{{part}}": rate("loraplex_step_seconds_total", "part", GATEWAY)},
        "Of one second, all workers together: forward is the device's, the rest is overhead.",
    ),
    Panel(
        "CPU of processes",
        "short",
        {"{{process}} {{instance}}": rate("process_cpu_seconds_total", "process, instance")},
        "In cores. A gateway has one: near 1 it is the bottleneck.",
    ),
    Panel(
        "Memory of processes",
        "bytes",
        {"{{process}} {{instance}}": "process_resident_memory_bytes"},
        "Resident bytes; a steady climb is a leak.",
    ),
    Panel(
        "Age of the catalog",
        "s",
        {"{{instance}}": "loraplex_catalog_age_seconds"},
        "Time since the database confirmed it; requests are refused after catalog_stale_s.",
    ),
    Panel(
        "Certificates end in",
        "s",
        {"{{certificate}}": "loraplex_certificate_expiry_timestamp_seconds - time()"},
        "By the setting that names the file; empty without TLS.",
    ),
)
TENANTS = (
    Panel(
        "Tokens by tenant",
        TOKENS,
        {"{{tenant}}": rate("loraplex_tenant_tokens_total", "tenant")},
        "The 100 that use most, by id; all others are in other.",
    ),
    Panel(
        "Requests by tenant",
        "reqps",
        {"{{tenant}}": rate("loraplex_tenant_requests_total", "tenant")},
        "That a worker had begun and that ended.",
    ),
    Panel(
        "Refusals by tenant",
        "reqps",
        {"{{tenant}}": rate("loraplex_tenant_refusals_total", "tenant")},
        "Whose requests are refused; for which limits: fairness and overload.",
    ),
    Panel(
        "Dollars an hour by tenant",
        "currencyUSD",
        {"{{tenant}}": f"3600 * {rate('loraplex_tenant_cost_total', 'tenant')}"},
        "By the prices of each tenant; 0 where none is set.",
    ),
    Panel(
        "Tokens by version of an adapter, the first 20",
        TOKENS,
        {
            "{{tenant}} {{adapter}}@{{version}}": "topk(20, "
            + rate("loraplex_adapter_tokens_total", "tenant, adapter, version")
            + ")"
        },
        "During a canary two versions of one adapter show their parts.",
    ),
    Panel(
        "Part of tokens in `other`",
        "percentunit",
        {
            "tenants": rate("loraplex_tenant_tokens_total", "", '{tenant="other"}')
            + " / "
            + rate("loraplex_tenant_tokens_total")
        },
        "How much the panels by tenant do not name.",
    ),
    Panel(
        "Usage that waits for the database",
        "bytes",
        {
            "waits {{instance}}": "loraplex_usage_log_bytes",
            "bound {{instance}}": "loraplex_usage_log_max_bytes",
        },
        "On the gateways' disks. At the bound requests are refused.",
    ),
)
MEMORY = (
    Panel(
        "Adapters by tier",
        "short",
        {"{{tier}}": "sum by (tier) (loraplex_adapters)"},
        "By the nearest tier; disk counts all images of the disk caches.",
    ),
    Panel(
        "Bytes of adapters by tier",
        "bytes",
        {"{{tier}}": "sum by (tier) (loraplex_adapter_bytes)"},
        "Bounds: adapter_memory (device), host_adapter_memory, adapter_cache (disk).",
    ),
    Panel(
        "Loads by tier, evictions, failures",
        "ops",
        {
            "load to {{tier}}": rate("loraplex_adapter_loads_total", "tier", GATEWAY),
            "eviction": rate("loraplex_adapter_evictions_total", "", GATEWAY),
            "failure": rate("loraplex_adapter_load_failures_total", "", GATEWAY),
        },
        "As many evictions as loads for long: more adapters are in use than fit.",
    ),
    Panel(
        "Mean time of a load",
        "s",
        {
            "to {{tier}}": rate("loraplex_adapter_load_seconds_total", "tier", GATEWAY)
            + " / "
            + rate("loraplex_adapter_loads_total", "tier", GATEWAY)
        },
        "Requests wait for it; the batch does not.",
    ),
    Panel(
        "Sequences that hold an adapter",
        "short",
        {"{{instance}}": "sum by (instance) (loraplex_adapter_leases)"},
        "Their adapters cannot leave the device.",
    ),
    Panel(
        "The device's memory by use",
        "bytes",
        {
            "{{kind}} {{instance}}": "loraplex_arena_extents * on (instance) group_left ()"
            " (loraplex_arena_bytes / on (instance) sum by (instance) (loraplex_arena_extents))"
        },
        "KV pages, adapters, weights and what is free.",
    ),
    Panel(
        "KV cache in use",
        "percentunit",
        {"{{model_name}} {{instance}}": f"vllm:kv_cache_usage_perc{GATEWAY}"},
        "Of running sequences; kept prefixes count as free. Near 1 sequences are preempted.",
    ),
    Panel(
        "Prefix cache: part of tokens found",
        "percentunit",
        {
            "{{model_name}}": rate("vllm:prefix_cache_hits_total", "model_name", GATEWAY)
            + " / "
            + rate("vllm:prefix_cache_queries_total", "model_name", GATEWAY)
        },
        "Of prompt tokens. Each tenant finds its own prefixes only.",
    ),
    Panel(
        "Swaps of base models an hour",
        "short",
        {
            "{{model_name}}": "sum by (model_name)"
            f" (increase(loraplex_model_swaps_total{GATEWAY}[1h]))"
        },
        "How often weights came to a device; many: pin a model or add a worker.",
    ),
    Panel(
        "Time of a base model to the device",
        "s",
        {"{{model_name}}": f"max by (model_name) (loraplex_model_load_seconds{GATEWAY})"},
        "The last time, on the slowest worker.",
    ),
    Panel(
        "Models on a device",
        "short",
        {"{{model_name}}": f"sum by (model_name) (loraplex_model_on_device{GATEWAY})"},
        "Workers that have the weights on the device.",
    ),
)
FAIRNESS = (
    Panel(
        "Time in the queue by class",
        "s",
        quantiles("loraplex_queue_time_seconds", "class", GATEWAY),
        "At the worker, until the first step. Batch waits first; interactive should not.",
    ),
    Panel(
        "Time to first token by class, p95",
        "s",
        {"{{class}}": quantile(0.95, TTFT, "class", GATEWAY)},
        "Queue, load of the adapter, swap of the model and prefill together.",
    ),
    Panel(
        "Completion tokens by class",
        TOKENS,
        {
            "{{class}}": rate(
                "loraplex_tokens_total", "class", '{model_name=~"$model", kind="completion"}'
            )
        },
        "Under overload each class keeps its guaranteed share.",
    ),
    Panel(
        "Part of tokens by tenant, the first 10",
        "percentunit",
        {
            "{{tenant}}": f"topk(10, {rate('loraplex_tenant_tokens_total', 'tenant')})"
            f" / scalar({rate('loraplex_tenant_tokens_total')})"
        },
        "A tenant far above its weight while others wait is worth a look.",
    ),
    Panel(
        "Refusals by limit",
        "reqps",
        {"{{limit}}": rate("loraplex_limit_refusals_total", "limit")},
        "Requests over a limit of their tenant or key.",
    ),
    Panel(
        "Sequences refused or failed at workers",
        "reqps",
        {"{{code}}": rate("loraplex_sequence_failures_total", "code", GATEWAY)},
        "overloaded and expired: no room in time. Others are failures.",
    ),
    Panel(
        "Sequences that went to another worker",
        "ops",
        {"{{kind}}": rate("loraplex_moves_total", "kind")},
        "After a worker was lost or drained; poisonous ones were refused.",
    ),
    Panel(
        "Preemptions",
        "ops",
        {"{{model_name}}": rate("vllm:num_preemptions_total", "model_name", GATEWAY)},
        "Running sequences that lost their pages and compute them again.",
    ),
    Panel(
        "Prompt tokens that wait",
        "short",
        {"{{model_name}}": f"sum by (model_name) (loraplex_waiting_tokens{GATEWAY})"},
        "Divided by the prefill rate it is the seconds of work that wait.",
    ),
    Panel(
        "Renewal of limits",
        "s",
        {
            f"p{q}": f"histogram_quantile(0.{q}, {rate(f'{RENEWAL}_bucket', 'le')})"
            for q in (50, 99)
        },
        "The database's time. Requests near a limit wait for it.",
    ),
    Panel(
        "Requests that waited for limits",
        "reqps",
        {"waited": rate("loraplex_limit_waits_total")},
        "What this gateway held of a limit did not do; the next renewal decided.",
    ),
    Panel(
        "Renewals without an answer, connections refused",
        "ops",
        {
            "renewals": rate("loraplex_lease_renewal_failures_total"),
            "connections: {{reason}}": rate("loraplex_connections_refused_total", "reason"),
        },
        "The database is away; or bounds of the server were met.",
    ),
)
DASHBOARDS = {
    "service": ("loraplex: service", SERVICE),
    "tenants": ("loraplex: tenants and cost", TENANTS),
    "memory": ("loraplex: adapters and memory", MEMORY),
    "fairness": ("loraplex: fairness and overload", FAIRNESS),
}
DAY_S = 86_400
ALERTS = (
    Alert(
        *("LoraplexTargetDown", "critical", 'up{job=~"loraplex.*"} == 0', 2),
        "Prometheus cannot read a gateway or worker.",
    ),
    Alert(
        *("LoraplexAbsent", "critical", 'absent(up{job=~"loraplex.*"})', 5),
        "Prometheus knows no gateway or worker at all.",
    ),
    Alert(
        *("LoraplexNoWorker", "critical", 'loraplex_workers{state="ready"} == 0', 1),
        "A gateway has no worker that is ready.",
    ),
    Alert(
        *("LoraplexWorkerLost", "warning", 'max(loraplex_workers{state=~"lost|silent"}) > 0', 2),
        "A worker of the catalog does not answer a gateway.",
    ),
    Alert(
        *("LoraplexCatalogStale", "critical", "max(loraplex_catalog_age_seconds) > 60", 1),
        "A gateway has been without its database: requests get 503 after catalog_stale_s.",
    ),
    Alert(
        "LoraplexUsageLogFull",
        "critical",
        "max(loraplex_usage_log_bytes / loraplex_usage_log_max_bytes) > 0.5",
        5,
        "Usage is not loaded: at max_usage_wal requests are refused.",
    ),
    Alert(
        "LoraplexLimitsNotRenewed",
        "warning",
        "sum(rate(loraplex_lease_renewal_failures_total[5m])) > 0",
        5,
        "The database does not answer renewals of limits.",
    ),
    Alert(
        "LoraplexLimitsSlow",
        "warning",
        "histogram_quantile(0.99, sum by (le) (rate(loraplex_lease_renewal_seconds_bucket[5m])))"
        " > 0.5",
        10,
        "The database takes long for renewals of limits.",
    ),
    Alert(
        "LoraplexClockDiffers",
        "warning",
        "max(abs(loraplex_database_clock_difference_seconds)) > 5",
        2,
        "The clock of a gateway's machine is not the database's.",
    ),
    Alert(
        "LoraplexUsageSumsDiffer",
        "critical",
        "max(loraplex_usage_sums_differing) > 0",
        1,
        "Costs are reported from sums that differ from the usage they were made of.",
    ),
    Alert(
        "LoraplexTaskFails",
        "warning",
        "max by (task) (loraplex_task_failing_since_timestamp_seconds) > 0",
        10,
        "A background task of a gateway or admin plane fails.",
    ),
    Alert(
        "LoraplexCertificateEnds",
        "warning",
        "min by (certificate) (loraplex_certificate_expiry_timestamp_seconds) - time()"
        f" < {7 * DAY_S}",
        10,
        "A certificate ends within a week.",
    ),
    Alert(
        "LoraplexRequestsFail",
        "critical",
        '(sum(rate(loraplex_requests_total{status="failed"}[5m])) or vector(0))'
        " / sum(rate(loraplex_requests_total[5m])) > 0.02",
        5,
        "More than 2 % of requests fail after they have begun.",
    ),
    Alert(
        "LoraplexOverloaded",
        "warning",
        'sum(rate(loraplex_sequence_failures_total{code=~"overloaded|expired"}[5m]))'
        " > 0.05 * sum(rate(vllm:request_success_total[5m]))",
        10,
        "Workers refuse more than 5 % for want of room or time.",
    ),
    Alert(
        "LoraplexQueueGrows",
        "warning",
        "sum by (model_name) (vllm:num_requests_waiting)"
        " > 2 * sum by (model_name) (vllm:num_requests_running) + 10",
        10,
        "More than twice as many sequences wait as run.",
    ),
    Alert(
        "LoraplexSlowFirstToken",
        "warning",
        "histogram_quantile(0.95, sum by (le, class)"
        ' (rate(loraplex_time_to_first_token_seconds_bucket{class="interactive"}[5m]))) > 2',
        10,
        "Interactive requests wait more than 2 s for the first token.",
    ),
    Alert(
        "LoraplexPreemptions",
        "warning",
        "sum by (model_name) (rate(vllm:num_preemptions_total[10m])) > 0.5",
        10,
        "Sequences are put back for want of memory.",
    ),
    Alert(
        "LoraplexAdapterLoadsFail",
        "warning",
        "sum by (instance) (increase(loraplex_adapter_load_failures_total[15m])) > 3",
        0,
        "Adapters cannot be loaded.",
    ),
    Alert(
        "LoraplexAdaptersThrash",
        "warning",
        "sum by (instance) (rate(loraplex_adapter_evictions_total[10m]))"
        " > 0.5 * sum by (instance) (rate(vllm:request_success_total[10m]))",
        15,
        "Every second request takes another adapter off the device.",
    ),
    Alert(
        "LoraplexModelsThrash",
        "warning",
        "sum by (instance) (increase(loraplex_model_swaps_total[30m])) > 20",
        0,
        "Base models take turns on a device too often.",
    ),
    Alert(
        "LoraplexPoisonousRequests",
        "warning",
        'sum(increase(loraplex_moves_total{kind="poisonous"}[1h])) > 0',
        0,
        "A request was refused because workers were lost with it.",
    ),
    Alert(
        "LoraplexMemoryContradicts",
        "critical",
        "sum by (instance) (increase(loraplex_integrity_failures_total[1h])) > 0",
        0,
        "The accounting of a worker's memory contradicts itself.",
    ),
    Alert(
        "LoraplexDescriptors",
        "warning",
        "max by (instance, process) (process_open_fds / process_max_fds) > 0.8",
        5,
        "A process has few descriptors left.",
    ),
)


def dashboard(uid: str, title: str, panels: Iterable[Panel]) -> dict[str, Any]:
    """Returns a dashboard as JSON that Grafana can import. Menus above the panels select the data
    source, the scrape jobs and the base models."""
    return {
        "uid": f"loraplex-{uid}",
        "title": title,
        "tags": ["loraplex"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                },
                _choice("job", "Job", f'label_values(up{{job=~"{JOBS}"}}, job)', JOBS),
                _choice(
                    "model",
                    "Base model",
                    'label_values(vllm:num_requests_running{job=~"$job"}, model_name)',
                    ".*",
                ),
            ]
        },
        "panels": list(_placed(panels)),
    }


def _choice(name: str, label: str, query: str, everything: str) -> dict[str, Any]:
    """Returns a dashboard variable, of which users select several values or all."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": everything,
        "current": {"text": "All", "value": "$__all"},
    }


def _placed(panels: Iterable[Panel]) -> Iterator[dict[str, Any]]:
    """Yields the panels with their places, from left to right. A panel that does not fit into the
    row, or has another height, begins a new row."""
    x = y = height = 0
    for number, panel in enumerate(panels):
        is_stat = panel.kind == "stat"
        wide, high = (STAT_WIDTH, STAT_HEIGHT) if is_stat else (WIDTH, HEIGHT)
        if high != height or x + wide > ROW_WIDTH:
            x, y, height = 0, y + height, high
        yield _panel(number, panel, {"x": x, "y": y, "w": wide, "h": high})
        x += wide


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + n), "expr": of_jobs("$job", query), "legendFormat": legend}
            for n, (legend, query) in enumerate(panel.queries.items())
        ],
    }


class Query(NamedTuple):
    where: str
    expression: str
    legend: str = ""


def queries() -> Iterator[Query]:
    """Yields every query of the dashboards and alerts."""
    for uid, (_, panels) in DASHBOARDS.items():
        for panel in panels:
            for legend, expression in panel.queries.items():
                yield Query(f"{uid}: {panel.title}", of_jobs(JOBS, expression), legend)
    for alert in ALERTS:
        yield Query(alert.name, of_jobs(JOBS, alert.expression))


def rules() -> dict[str, Any]:
    """Returns the contents of a Prometheus rule file. The same object can be the `spec` of a
    PrometheusRule."""
    return {
        "groups": [
            {
                "name": "loraplex",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": of_jobs(JOBS, alert.expression),
                        "for": f"{alert.minutes}m",
                        "labels": {"severity": alert.severity},
                        "annotations": {
                            "summary": alert.summary,
                            "runbook": f"{RUNBOOK}#{alert.name.lower()}",
                        },
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }


def files() -> dict[Path, str]:
    """Returns the text of each file in k8s/dashboards."""
    made = {
        FOLDER / f"{uid}.json": json.dumps(dashboard(uid, *what), indent=1) + "\n"
        for uid, what in DASHBOARDS.items()
    }
    return made | {FOLDER / "alerts.yaml": yaml.safe_dump(rules(), sort_keys=False, width=120)}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
