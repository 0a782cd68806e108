"""The worked example of docs/understand/extending.md: one declaration adds a field to a version."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tools.source_tree import ROOT

PAGE = ROOT / "docs/understand/extending.md"
SCRIPT = """
import importlib.util, json, sys
from pathlib import Path

declaration = sys.argv[1]
spec = importlib.util.find_spec("store.records")
text = Path(spec.origin).read_text()
place = "    tool_format: ToolFormat | None = None\\n"
assert text.count(place) == 1
records = importlib.util.module_from_spec(spec)
sys.modules["store.records"] = records
text = text.replace(place, f"    {declaration}\\n{place}")
exec(compile(text, spec.origin, "exec"), vars(records))

from admin.adapters.schemas import ServingView
from admin.adapters.serving_data import parse_serving
from gateway.catalog.cards import AdapterCard
from gateway.app import ROUTES
from gateway.http.openapi import describe, document
from gateway.http.request import GatewayRequest
from litestar import Litestar
from store.errors import Invalid
from tests.admin.http.test_openapi import DOCUMENT
from web.openapi import Requirements, StructSchemas
import msgspec

plugins = [StructSchemas(), Requirements(describe)]
gateway = Litestar(
    ROUTES, request_class=GatewayRequest, openapi_config=document(), plugins=plugins
).openapi_schema.to_schema()

serving = parse_serving('{"reasoning_format": "think"}')
stored = msgspec.json.decode(msgspec.json.encode(serving), type=records.ServingData)
assert stored.shared()["reasoning_format"] == "think"
try:
    parse_serving('{"reasoning_format": "loud"}')
except Invalid as error:
    assert "reasoning_format" in str(error)
else:
    raise AssertionError
for view in (ServingView, AdapterCard):
    assert "reasoning_format" in view.__struct_fields__
for document, name in ((DOCUMENT, "ServingView"), (gateway, "AdapterCard")):
    field = document["components"]["schemas"][name]["properties"]["reasoning_format"]
    assert {"think", "none"} <= set(json.dumps(field).split('"')), field
"""


@pytest.mark.full
def test_a_field_is_declared_once() -> None:
    """Uploads take it and refuse other values, rows keep it, and both planes show it."""
    section = PAGE.read_text().split("## A field of an adapter version\n")[1].split("\n## ")[0]
    assert len(re.findall(r"^\d\. ", section, re.MULTILINE)) <= 5
    declaration = " ".join(re.findall(r"`(reasoning_format: [^`]+)`", section)[0].split())
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, declaration], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
