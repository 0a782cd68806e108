"""A real Prometheus that reads one page, where its program is installed (Debian's package
prometheus)."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.dashboards import FOLDER
from tests.plane import free_port

PROGRAM = shutil.which("prometheus")
DEADLINE_S = 60.0
SCRAPE_MS = 250
STEP_S = 0.5


class Prometheus:
    def __init__(self, api: httpx.Client) -> None:
        self._api = api

    def get(self, path: str, **parameters: object) -> Any:
        """The data of an answer, which is no error."""
        answer = self._api.get(path, params={k: str(v) for k, v in parameters.items()})
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def values(self, expression: str, start: float, end: float) -> list[set[float | None]]:
        """Those that each series of the expression had between two times; None: at some time none.
        Series that never had a number are left out."""
        found = self.get("query_range", query=expression, start=start, end=end, step=STEP_S)
        num_steps = int((end - start) / STEP_S) + 1
        result: list[set[float | None]] = []
        for series in found["result"]:
            numbers = [value for _, text in series["values"] if not isnan(value := float(text))]
            if numbers:
                result.append({*numbers, *([None] if len(numbers) < num_steps else [])})
        return result

    def wait_for(self, expression: str) -> None:
        """Until the expression has a value."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.get("query", query=expression)["result"]:
            assert time.monotonic() < deadline, expression
            time.sleep(0.1)


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[Prometheus]:
    """Started with our alert rules. target: the address of the page."""
    config = {
        "global": {"scrape_interval": f"{SCRAPE_MS}ms"},
        "rule_files": [str(FOLDER / "alerts.yaml")],
        "scrape_configs": [{"job_name": "loraplex", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    assert PROGRAM is not None
    command = [
        PROGRAM,
        f"--config.file={folder}/prometheus.yaml",
        f"--storage.tsdb.path={folder}/tsdb",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not _is_ready(f"http://{address}/-/ready"):
            assert process.poll() is None and time.monotonic() < deadline, (
                folder / "prometheus.log"
            ).read_text()
            time.sleep(0.1)
        with httpx.Client(base_url=f"http://{address}/api/v1", timeout=DEADLINE_S) as api:
            yield Prometheus(api)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False
