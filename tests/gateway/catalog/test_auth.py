"""Who may call what."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from gateway.app import create_app
from gateway.config import GatewayConfig
from tests.gateway.pepper import PEPPER
from tests.gateway.service import FedSource, Service, snapshot

PUBLIC = {
    *("/livez", "/readyz", "/health", "/version"),
    *("/", "/docs", "/schema", "/schema/openapi.json"),
}


def test_public_routes(tmp_path: Path) -> None:
    config = GatewayConfig(model_folder=tmp_path.joinpath, pepper=PEPPER, wal=tmp_path / "spool")
    app = create_app(config, source=FedSource(snapshot([])), clients=[])
    assert {path for each in app.routes if each.needs is None for path in each.paths} == PUBLIC


PROTECTED = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
]


@pytest.mark.parametrize(("method", "path"), PROTECTED)
def test_keys_that_may_not(service: Service, method: str, path: str) -> None:
    keys = service.keys

    def status(authorization: str | None) -> int:
        headers = {} if authorization is None else {"authorization": authorization}
        return httpx.request(method, service.url + path, headers=headers).status_code

    assert status(None) == 401
    assert status("") == 401
    assert status(keys.acme) == 401
    assert status(f"Basic {keys.acme}") == 401
    assert status("Bearer lpx_nonsense") == 401
    assert status(f"Bearer {keys.acme[:-1]}") == 401
    assert status(f"Bearer {keys.unissued}") == 401
    assert status(f"Bearer {keys.expired}") == 401
    assert status(f"Bearer {keys.revoked}") == 401
    assert status(f"Bearer {keys.admin}") == 403
    assert status(f"Bearer {keys.uploader}") == 403


def test_all_bad_keys_read_the_same(service: Service) -> None:
    bad = ["lpx_nonsense", service.keys.unissued, service.keys.expired, service.keys.revoked]
    answers = [
        httpx.get(f"{service.url}/v1/models", headers={"authorization": f"Bearer {key}"})
        for key in bad
    ]
    assert {answer.text for answer in answers} == {answers[0].text}
    assert answers[0].json()["error"]["code"] == "invalid_api_key"
    assert answers[0].headers["www-authenticate"] == "Bearer"
    assert not any(key in answer.text for key in bad for answer in answers)


def test_a_key_revoked_while_serving(service: Service) -> None:
    headers = {"authorization": f"Bearer {service.keys.globex}"}
    url = f"{service.url}/v1/models"
    assert httpx.get(url, headers=headers).status_code == 200
    others = [key for key in service.keys.records if key.tenant_id != "ten_globex"]
    service.call(lambda: service.source.feed(snapshot(others, generation=2)))
    service.wait_for(lambda: httpx.get(url, headers=headers).status_code == 401)
    service.call(lambda: service.source.feed(snapshot(service.keys.records, generation=3)))
    service.wait_for(lambda: httpx.get(url, headers=headers).status_code == 200)
