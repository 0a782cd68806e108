"""Every address of a Service in a page or a manifest leads to a port that the Service has."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.preloaded import ROOT

ADDRESS = re.compile(
    r"(?P<scheme>https?|tcp)://(?P<host>[a-z0-9-]*loraplex[a-z0-9-]*)(?P<domain>(?:\.[a-z0-9-]+)*)"
    r"(?::(?P<port>\d+))?(?=[^A-Za-z0-9.:@-]|$)"
)
FORWARD = re.compile(r"port-forward (?:service|svc)/(?P<host>[a-z-]+) \d*:?(?P<port>\d+)")
DEFAULT = {"http": 80, "https": 443}
RENDERED = sorted((ROOT / "k8s/rendered").glob("*.yaml"))


def services() -> dict[str, set[int]]:
    """Ports of each Service of any rendered overlay, and of pods of a headless one."""
    ports: dict[str, set[int]] = defaultdict(set)
    for file in RENDERED:
        for found in yaml.safe_load_all(file.read_text()):
            if found and found["kind"] == "Service":
                ports[found["metadata"]["name"]] |= {
                    each["port"] for each in found["spec"]["ports"]
                }
    return ports


def addresses() -> Iterator[tuple[Path, str, str, int]]:
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "k8s").rglob("*.yaml"), ROOT / "README.md"]
    for file in files:
        text = file.read_text()
        for found in ADDRESS.finditer(text):
            port = int(found["port"] or DEFAULT.get(found["scheme"], 0))
            # worker-0.loraplex-worker:9000 is a pod of a headless Service.
            yield file, found[0], found["host"], port
        for found in FORWARD.finditer(text):
            yield file, found[0], found["host"], int(found["port"])


def test_addresses_name_ports_of_services() -> None:
    known = services()
    assert known
    checked = 0
    for file, address, host, port in addresses():
        if host in known:
            checked += 1
            assert port in known[host], f"{file.relative_to(ROOT)}: {address}: {known[host]}"
    assert checked >= 3


@pytest.mark.parametrize("text", ["http://loraplex-admin:8000/x", "http://loraplex-admin:8000`"])
def test_a_wrong_port_would_be_noticed(text: str) -> None:
    found = ADDRESS.search(text)
    assert found is not None and found["host"] == "loraplex-admin"
    assert int(found["port"]) not in services()["loraplex-admin"]
