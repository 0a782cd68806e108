"""A gateway whose model has the chat template of Qwen 3, and Anthropic's client."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.gateway.service import Service
from tests.gateway.templated import templated_service


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with templated_service(tmp_path_factory.mktemp("qwen3")) as service:
        yield service


@pytest.fixture
def messages(service: Service) -> Iterator[anthropic.Anthropic]:
    """acme's; afterwards nothing of the test is left running."""
    options = {"base_url": service.url, "max_retries": 0, "timeout": 20}
    with anthropic.Anthropic(api_key=service.keys.acme, **options) as client:
        yield client
    service.wait_for(lambda: service.gateway.admission.num_open == 0)
    service.wait_for(lambda: not service.gateway.in_flight_requests.by_version)
