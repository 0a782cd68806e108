"""The admin plane's document: valid, whole, and true where a schema can be compared with code."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from litestar.routes import HTTPRoute
from openapi_spec_validator import OpenAPIV31SpecValidator

from tests.admin.calls import make_app
from tests.admin.conftest import Plane
from tests.admin.http.test_routes import problem

APP = make_app()
DOCUMENT = APP.openapi_schema.to_schema()
SCHEMAS = DOCUMENT["components"]["schemas"]
BODIES = {
    handler.parsed_data_field.annotation
    for route in APP.routes
    if isinstance(route, HTTPRoute)
    for handler in route.route_handlers
    if handler.parsed_data_field is not None
}


def test_it_is_openapi():
    OpenAPIV31SpecValidator(DOCUMENT).validate()


def test_it_has_every_route_and_no_other():
    routes = {
        (route.path_format, method.lower())
        for route in APP.routes
        if isinstance(route, HTTPRoute)
        for method in route.methods - {"OPTIONS"}
        if not route.path.startswith("/admin/v1/schema")
    }
    assert routes == {(path, method) for path, of in DOCUMENT["paths"].items() for method in of}


@pytest.mark.parametrize("kind", sorted(BODIES, key=str), ids=lambda kind: kind.__name__)
def test_examples_are_what_the_plane_takes(kind: Any):
    (example,) = SCHEMAS[kind.__name__]["examples"]
    assert example == kind.example
    msgspec.json.decode(msgspec.json.encode(example), type=kind)


def test_schemas_are_those_of_the_decoder():
    """Bounds below the first level of a type, and that unknown fields are refused."""
    created = SCHEMAS["KeyCreate"]
    assert created["additionalProperties"] is False
    names, null = created["properties"]["models"]["anyOf"]
    assert names["maxItems"] == 256 and "pattern" in names["items"]
    assert null == {"type": "null"}


def test_each_operation_says_who_may_and_how_it_refuses():
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            scopes = {scope for each in operation["security"] for scope in each["key"]}
            assert "admin" in scopes, path
            statuses = operation["responses"].keys()
            assert {"400", "401", "403", "503"} <= statuses, path
            assert ("409" in statuses) == (method != "get"), path
            headers = {parameter["name"] for parameter in operation.get("parameters", ())}
            assert ("412" in statuses) == ("If-Match" in headers), path
            assert ("422" in statuses) == ("Idempotency-Key" in headers), path


async def test_it_is_served_to_admins(plane: Plane):
    answer = await plane.client.get("schema")
    assert answer.status_code == 200
    assert answer.json() == msgspec.to_builtins(DOCUMENT)
    tenant = await plane.tenant("acme")
    problem(await tenant.get("schema"), 403)
