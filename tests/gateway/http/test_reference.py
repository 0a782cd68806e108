"""The reference: as a page of the documentation and as what /docs serves, from the same tables."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from html import escape

import httpx
import pytest

from gateway.error_codes import CODES
from gateway.http.call_examples import curl, python
from gateway.http.reference import reference
from store.errors import ApiError
from tests.gateway.service import Service
from tools.api_page import pages
from tools.source_tree import source_tree
from web.edge import NO_LIMIT_LEFT
from web.error_answers import CODES as FRAMEWORK_CODES
from web.error_answers import FrameworkRefusal
from web.errors import IdempotencyKeyReused, PreconditionFailed, TooMany

OF_ADMIN = {IdempotencyKeyReused, PreconditionFailed, TooMany}
"""Failures that only the admin plane raises with their own code."""


def test_the_pages_are_what_the_document_says() -> None:
    for page, text in pages().items():
        assert page.read_text() == text, "run `make api`"


@pytest.mark.full
def test_every_code_has_its_meaning() -> None:
    """Those of the classes of failures, and those that are given where an error is raised."""
    failures = {*_subclasses(ApiError)} - {FrameworkRefusal}
    own = {each for each in failures if each.__module__ in ("gateway.exceptions", "web.errors")}
    statuses = {each.code: each.status for each in own - OF_ADMIN if each.code}
    named = {*statuses, *FRAMEWORK_CODES.values()}
    for name, tree in source_tree().trees.items():
        if name.startswith(("gateway.", "web.")):
            named.update(_codes(tree))
    assert named | {NO_LIMIT_LEFT} == CODES.keys()
    assert {code: CODES[code][0] for code in statuses} == statuses


def _subclasses(kind: type[ApiError]) -> Iterator[type[ApiError]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _codes(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "code":
            for value in ast.walk(node.value):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value


def test_docs_shows_all_of_it_and_loads_nothing(service: Service) -> None:
    answer = httpx.get(f"{service.url}/docs")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"<script|<link|<img|@import|url\(|(?:href|src)=.?https?:", answer.text)
    found = reference(httpx.get(f"{service.url}/schema").json())
    for route in found.routes:
        assert all(path in answer.text for path in route.paths)
        assert all(escape(line) in answer.text for line in (*curl(route), *python(route)))
        for name, *_ in route.body.fields if route.body else ():
            assert f"<code>{name}</code>" in answer.text
    for name in [*CODES, *(header.name for header in found.headers)]:
        assert name in answer.text
