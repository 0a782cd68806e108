"""The admin plane's document: valid, whole, and true where a schema can be compared with code."""

from __future__ import annotations

import msgspec
import pytest
from litestar.routes import HTTPRoute
from openapi_spec_validator import OpenAPIV31SpecValidator

from admin.http.openapi import EXAMPLES, OPERATIONS, make_document
from tests.admin.conftest import Plane
from tests.admin.http.test_fuzz import make_app
from tests.admin.http.test_routes import problem

APP = make_app()
DOCUMENT = make_document(APP)


def test_it_is_openapi():
    OpenAPIV31SpecValidator(DOCUMENT).validate()


def test_it_has_every_route_and_no_other():
    routes = {
        (route.path_format, method.lower())
        for route in APP.routes
        if isinstance(route, HTTPRoute)
        for method in route.methods - {"OPTIONS"}
    }
    assert routes == {(path, method) for path, of in DOCUMENT["paths"].items() for method in of}


def test_what_is_added_is_added_to_something():
    names = {
        handler.handler_name
        for route in APP.routes
        if isinstance(route, HTTPRoute)
        for handler in route.route_handlers
    }
    assert names >= OPERATIONS.keys()


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_examples_are_what_the_plane_takes(kind: type):
    msgspec.json.decode(msgspec.json.encode(EXAMPLES[kind]), type=kind)
    assert EXAMPLES[kind] in [
        content.get("example")
        for methods in DOCUMENT["paths"].values()
        for operation in methods.values()
        for content in operation.get("requestBody", {"content": {}})["content"].values()
    ]


def test_each_operation_says_who_may_and_how_it_refuses():
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            scopes = {scope for each in operation["security"] for scope in each["key"]}
            assert "admin" in scopes, path
            statuses = operation["responses"].keys()
            assert {"400", "401", "403", "503"} <= statuses, path
            assert ("409" in statuses) == (method != "get"), path
            headers = {parameter["name"] for parameter in operation["parameters"]}
            assert ("412" in statuses) == ("If-Match" in headers), path
            assert ("422" in statuses) == ("Idempotency-Key" in headers), path


async def test_it_is_served_to_admins(plane: Plane):
    answer = await plane.client.get("schema")
    assert answer.status_code == 200
    assert answer.json() == msgspec.to_builtins(DOCUMENT)
    tenant = await plane.tenant("acme")
    problem(await tenant.get("schema"), 403)
