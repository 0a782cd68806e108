"""Text that Postgres cannot hold is refused by the name of its field, wherever it is sent."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters.files import encode, write_adapter
from tests.admin.calls import ABSENT, ROUTES
from tests.admin.conftest import Plane
from tests.admin.uploads.test_upload import parts

NUL = "\0"
WORDS_OF_POSTGRES = ("unicode escape", "0x00", "utf8", "byte sequence", "jsonb", "$1")


def assert_refused(answer: httpx.Response, where: str) -> dict[str, Any]:
    assert answer.status_code == 400, (where, answer.text)
    error = answer.json()["error"]
    for words in WORDS_OF_POSTGRES:
        assert words not in error["message"].lower(), (where, error)
    return error


def with_nul(value: Any) -> Iterator[tuple[str, Any]]:
    """The value with NUL in one of its texts, or in one of its keys; and which field that is of."""
    if isinstance(value, str):
        yield "", value + NUL
    elif isinstance(value, list):
        for number, item in enumerate(value):
            for _, changed in with_nul(item):
                yield "", [*value[:number], changed, *value[number + 1 :]]
    elif isinstance(value, dict):
        for key, item in value.items():
            for _, changed in with_nul(item):
                yield key, {**value, key: changed}


async def test_no_body_of_a_route_has_it(plane: Plane) -> None:
    """Each text of the bodies of all routes."""
    num_sent, names = 0, dict.fromkeys(ABSENT, "1")
    for route in ROUTES:
        if route.path.startswith("/admin/v1/") and route.body is not None:
            url = plane.url.removesuffix("/admin/v1") + route.path.format_map(names)
            for field, body in with_nul(route.body):
                answer = await plane.client.request(route.method, url, json=body)
                error = assert_refused(answer, f"{route.name} {field}")
                assert error["param"] == field, (route.name, error)
                num_sent += 1
    assert num_sent > 10


SERVING = [
    {"stop": ["end", f"a{NUL}"]},
    {"metadata": {"note": f"a{NUL}b"}},
    {"metadata": {f"no{NUL}te": "a"}},
    {"chat_template": f"{{{{ messages }}}}{NUL}"},
]


@pytest.mark.parametrize("serving", SERVING)
async def test_what_an_upload_brings_has_it_not(
    plane: Plane, base: str, tmp_path: Path, serving: dict[str, Any]
) -> None:
    await plane.tenant("acme")
    write_adapter(tmp_path / "bot")
    fields = {"name": "bot", "tenant": "acme", "serving": json.dumps(serving)}
    files = parts(tmp_path / "bot")
    answer = await plane.client.post("adapters", data=fields, files=files)
    error = assert_refused(answer, str(serving))
    assert error["param"] == "serving" and "serving." in error["message"]
    (field,) = serving
    assert field in error["message"]
    as_json = {"name": "bot", "tenant": "acme", "upload": "0" * 12, "serving": serving}
    assert assert_refused(await plane.client.post("adapters", json=as_json), "")["param"] == (
        "serving"
    )


@pytest.mark.parametrize("field", ["name", "model", "tenant", "alias", "sha256"])
async def test_no_field_of_an_upload_has_it(plane: Plane, base: str, field: str) -> None:
    await plane.tenant("acme")
    fields = {"name": "bot", "tenant": "acme"} | {field: f"a{NUL}"}
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": encode({}, b"")}
    answer = await plane.client.post("adapters", data=fields, files=files)
    assert assert_refused(answer, field)["param"] == field


CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": f"LORA{NUL}"},
        {f"no{NUL}key": 1},
        {"base_model_name_or_path": f"a{NUL}"},
        {"target_modules": [f"q{NUL}"]},
        {"task_type": f"{NUL}"},
    ],
)
async def test_the_configuration_of_an_adapter_has_it_not(
    plane: Plane, base: str, changes: dict[str, Any]
) -> None:
    """A refused upload is listed with what was wrong."""
    acme = await plane.tenant("acme")
    config = json.dumps(CONFIG | changes)
    files = {
        "adapter_config.json": config.encode(),
        "adapter_model.safetensors": encode({}, b""),
    }
    answer = await acme.post("adapters", data={"name": "bot"}, files=files)
    error = assert_refused(answer, str(changes))
    assert error["code"].startswith("adapter."), error
    (listed,) = (await acme.get("uploads/rejected")).json()["data"]
    assert listed["error"]["code"] == error["code"]


async def test_a_tensor_whose_name_has_it_is_named(plane: Plane, base: str) -> None:
    acme = await plane.tenant("acme")
    header = json.dumps(
        {f"base.{NUL}lora_A.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(4)
    files = {
        "adapter_config.json": json.dumps(CONFIG).encode(),
        "adapter_model.safetensors": weights,
    }
    error = assert_refused(await acme.post("adapters", data={"name": "bot"}, files=files), "")
    assert error["code"].startswith("adapter.")
    assert (await acme.get("uploads/rejected")).json()["data"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("adapters?tenant=a%00", "tenant"),
        ("adapters?after=a%00", "after"),
        ("tenants?after=%00", "after"),
        ("models?after=a%00b", "after"),
        ("uploads/rejected?tenant=%00", "tenant"),
        ("audit?tenant=%00", "tenant"),
        ("usage?tenant=a%00", "tenant"),
    ],
)
async def test_no_parameter_has_it(plane: Plane, path: str, param: str) -> None:
    assert assert_refused(await plane.client.get(path), path)["param"] == param


async def test_no_parameter_of_an_openai_route_has_it(plane: Plane) -> None:
    url = plane.url.removesuffix("/admin/v1") + "/v1/organization/costs"
    for name in ("project_ids", "api_key_ids", "line_items", "page"):
        query = {"start_time": "1", name: f"a{NUL}"}
        assert_refused(await plane.client.get(url, params=query), name)


async def test_no_cursor_has_it(plane: Plane) -> None:
    cursor = json.dumps(["2026-01-01T00:00:00Z", f"ten{NUL}", "a", "b", 1, "c"])
    after = base64.urlsafe_b64encode(cursor.encode()).decode()
    query = {"start": "2026-01-01T00:00:00Z", "after": after}
    assert_refused(await plane.client.get("usage", params=query), "after")


async def test_a_backslash_before_it_is_text(plane: Plane) -> None:
    r"""`\\u0000` is six characters of JSON that mean a backslash and five others."""
    await plane.tenant("acme")
    answer = await plane.client.post("tenants/acme/keys", content=rb'{"name": "a\\u0000"}')
    assert answer.status_code == 201, answer.text
    assert answer.json()["record"]["name"] == r"a\u0000"
