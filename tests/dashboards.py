"""The queries of the Grafana dashboards and alert rules in k8s/dashboards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from tools.source_tree import ROOT

FOLDER = ROOT / "k8s" / "dashboards"
JOBS = "loraplex.*"
"""Pattern of the scrape jobs of gateways, admin planes and workers. Queries are restricted to these
jobs, because other programs export metrics with the same names."""


class Query(NamedTuple):
    where: str
    expression: str
    legend: str = ""


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return group["rules"]


def queries() -> Iterator[Query]:
    """Yields every query of the dashboards and alerts, for all jobs."""
    for path in sorted(FOLDER.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"].replace("$job", JOBS)
                yield Query(f"{path.stem}: {panel['title']}", expression, target["legendFormat"])
    for rule in alerts():
        yield Query(rule["alert"], rule["expr"])
