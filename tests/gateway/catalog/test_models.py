"""Names and what they mean: resolving, listing, following the catalog."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import openai
import pytest

from gateway.catalog.catalog import Catalog
from gateway.catalog.view import CatalogView
from gateway.exceptions import ModelNotFound
from store.records import Tenant
from tests.gateway.scripts import say
from tests.gateway.service import THEN, FedSource, Service, snapshot
from tests.scripted_worker import ScriptedWorker

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
ACME = Tenant(id="ten_acme", name="acme")


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("tiny", None),
        ("support-bot", "ten_acme-support-bot-7"),
        ("support-bot@prod", "ten_acme-support-bot-7"),
        ("support-bot@staging", "ten_acme-support-bot-3"),
        ("support-bot@3", "ten_acme-support-bot-3"),
        ("acme/support-bot", "ten_acme-support-bot-7"),
        ("acme/support-bot@3", "ten_acme-support-bot-3"),
        ("acme/support-bot@staging", "ten_acme-support-bot-3"),
    ],
)
def test_resolve(name: str, digest: str | None) -> None:
    target = CatalogView(snapshot([])).resolve(ACME, name)
    adapter = target.adapter_for("")
    assert (adapter.digest if adapter else None) == digest
    assert target.base.name == "tiny" and target.name == name


@pytest.mark.parametrize("name", ["secret", "globex/support-bot", "support-bot@9", "tiny@prod"])
def test_not_found(name: str) -> None:
    with pytest.raises(ModelNotFound):
        CatalogView(snapshot([])).resolve(ACME, name)


def test_a_model_has_the_time_of_its_registration(client: openai.OpenAI) -> None:
    assert client.models.retrieve("tiny").created == int(THEN.timestamp())


def test_another_tenant_lists_its_own(service: Service) -> None:
    with service.client(service.keys.globex) as client:
        assert {m.id for m in client.models.list()} == {
            "tiny",
            "elsewhere",
            "support-bot",
            "secret",
        }


@pytest.mark.parametrize("name", ["secret", "globex/secret", "nothing"])
def test_retrieve_of_others_is_not_found(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(name)


def test_a_promotion_is_seen_by_new_requests_only(
    service: Service, client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    worker.script = say("a long enough answer", pause_s=0.05)
    raw = client.chat.completions.with_raw_response.create(
        model="support-bot", messages=HELLO, stream=True
    )
    stream = iter(raw.parse())
    next(stream)
    promoted = snapshot(service.keys.records, generation=10, prod=3)
    service.call(lambda: service.source.feed(promoted))
    try:
        service.wait_for(lambda: client.models.retrieve("support-bot").root == "support-bot@3")  # type: ignore[attr-defined]
        later = client.chat.completions.with_raw_response.create(
            model="support-bot", messages=HELLO
        )
        assert later.headers["loraplex-adapter-version"] == "3"
        assert raw.headers["loraplex-adapter-version"] == "7"
        assert len(list(stream)) > 5
    finally:
        service.call(lambda: service.source.feed(snapshot(service.keys.records, generation=11)))
        service.wait_for(lambda: client.models.retrieve("support-bot").root == "support-bot@7")  # type: ignore[attr-defined]


async def test_the_catalog_follows_its_source() -> None:
    source = FedSource(snapshot([], generation=1))
    catalog = Catalog(source)
    assert catalog.view is None
    running = asyncio.create_task(catalog.run())
    await asyncio.wait_for(catalog.loaded.wait(), 5)
    first = catalog.view
    source.feed(snapshot([], generation=2, prod=3))
    while catalog.view is first:
        await asyncio.sleep(0)
    assert first and first.resolve(ACME, "support-bot").version.version == 7  # type: ignore[union-attr]
    assert catalog.view and catalog.view.resolve(ACME, "support-bot").version.version == 3  # type: ignore[union-attr]
    running.cancel()


def test_a_model_is_resolved_when_the_whole_request_is_there(service: Service) -> None:
    """Not in the catalog of when it began: a version retired meanwhile would be used once more."""
    body = b'{"model": "support-bot", "prompt": "Hi", "max_tokens": 2}'
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"authorization: Bearer {service.keys.acme}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    generation = service.gateway.catalog.current.generation
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as connection:
        connection.sendall(head.encode() + body[:10])
        time.sleep(0.3)
        for step, prod in ((1, 3), (2, 7)):
            catalog = snapshot(service.keys.records, generation=generation + step, prod=prod)
            service.feed(catalog)
            if step == 1:
                connection.sendall(body[10:])
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"loraplex-adapter-version: 3\r\n" in answer
