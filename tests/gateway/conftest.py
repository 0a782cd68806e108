"""One gateway with one scripted worker for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from gateway.text.template_process import TemplateProcesses
from store.database import Database
from tests.gateway.live import Live
from tests.gateway.service import Service, make_store
from tests.scripted_worker import ScriptedWorker

REPORT_INTERVAL_S = 0.1


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def service(store: Path) -> Iterator[Service]:
    # Many tests share it, and their refusals of large bodies come within one minute.
    with Service(store, tenant_refusals_per_minute=1_000_000) as service:
        yield service


@pytest.fixture(scope="session")
def processes() -> Iterator[TemplateProcesses]:
    """Those that render chat templates, of tests without a gateway."""
    processes = TemplateProcesses()
    yield processes
    processes.close()


@pytest.fixture
def worker(service: Service) -> ScriptedWorker:
    return service.worker


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    """acme's; afterwards nothing of the test is left running."""
    with service.client() as client:
        yield client
    service.wait_for(lambda: service.gateway.admission.num_open == 0)
    service.wait_for(lambda: not service.gateway.in_flight_requests.by_version)


@pytest.fixture
async def live(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Live:
    # Tests wait for usage, heartbeats and reports of workers, which production writes each second.
    monkeypatch.setattr("gateway.control.tasks.INTERVAL_S", REPORT_INTERVAL_S)
    live = Live(database, tmp_path)
    await live.prepare()
    return live
