"""Compressed bodies on the admin plane: JSON is decoded, and uploads are refused by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from tests.adapters.files import write_adapter
from tests.admin.conftest import Plane
from tests.admin.uploads.test_upload import parts


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_json_is_decoded_within_its_limit(plane: Plane, coding: str) -> None:
    encode = {"gzip": gzip.compress, "zstd": zstandard.compress}[coding]
    headers = {"content-encoding": coding, "content-type": "application/json"}
    for number, key in enumerate([{}, {"idempotency-key": "one"}]):
        data = encode(json.dumps({"name": f"acme-{number}"}).encode())
        made = await plane.client.post("tenants", content=data, headers={**headers, **key})
        assert made.status_code == 201, made.text
        assert made.json()["name"] == f"acme-{number}"
    bomb = encode(b" " * (8 << 20))
    refused = await plane.client.post("tenants", content=bomb, headers=headers)
    assert refused.status_code == 413


@pytest.mark.parametrize("coding", ["gzip", "zstd", "br"])
async def test_an_upload_is_refused_by_name(plane: Plane, tmp_path: Path, coding: str) -> None:
    client = await plane.tenant("acme", scopes=["adapters:write"])
    write_adapter(tmp_path / "adapter")
    answer = await client.post(
        "adapters", files=parts(tmp_path / "adapter"), headers={"content-encoding": coding}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (415, "unsupported_encoding")
    assert f"'{coding}'" in error["message"]
