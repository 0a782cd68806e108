"""What the gateway answers is what was recorded: see `recorded.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.gateway import recorded
from tests.gateway.service import Service
from tests.gateway.templated import templated_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with templated_service(tmp_path_factory.mktemp("qwen3")) as service:
        yield service


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns the names whose values differ."""
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def test_answers_are_those_recorded(service: Service) -> None:
    before, now = recorded.read().exchanges, recorded.exchanges(service)
    for name in changes(before, now):
        print(
            name,
            *(msgspec.json.encode(each.get(name)).decode() for each in (before, now)),
            sep="\n  ",
        )
    assert not changes(before, now)


def test_documents_helps_and_metrics_are_those_recorded(service: Service) -> None:
    record = recorded.read()
    documents, helps = recorded.documents(service), recorded.helps()
    assert httpx.get(f"{service.url}/schema/openapi.json").json() == documents["gateway"]
    for plane, document in documents.items():
        before = record.documents[plane]
        assert not changes(before["paths"], document["paths"])
        assert not changes(before["components"]["schemas"], document["components"]["schemas"])
        assert before == document
    assert not changes(record.helps, helps)
    assert recorded.metrics() == record.metrics
