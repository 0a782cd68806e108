"""A served admin plane against its own OpenAPI document: what it takes and what it answers.

`LORAPLEX_TEST_SCALE=full` sends 20,000 requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest
import requests
import schemathesis
from anyio.from_thread import BlockingPortal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi import checks

from tests.admin.calls import make_app
from tests.admin.dump import dump
from tests.admin.recorded import Recorder, recorder_on_thread
from tests.scale import scaled

load_all_checks()
pytestmark = pytest.mark.soak

EXCLUDED = [
    # Rules between fields and of what is there now (a digest that the store has, an expiry ahead)
    # are told in words only: what fits the schema may still be refused with 400, 404 or 409.
    checks.positive_data_acceptance,
]


schemathesis.openapi.format(
    "decimal", st.decimals(0, 2_000_000, places=6).map(str) | st.sampled_from(["NaN", "-1", "1e9"])
)


SCHEMA: Any = schemathesis.openapi.from_dict(make_app().openapi_schema.to_schema())
OPERATIONS = [
    (method, path)
    for path, methods in SCHEMA.raw_schema["paths"].items()
    for method in sorted(methods)
]
EXAMPLES = scaled(640, 20_000) // len(OPERATIONS)


class ThreadedPlane:
    """A furnished plane on a thread of its own."""

    def __init__(self, portal: BlockingPortal, made: Recorder) -> None:
        self._portal, self._made, self._copy = portal, made, ExitStack()
        admin = made.callers["administrator"]
        self.url, self.known = made.url, made.furnished.values
        self.headers = {"authorization": admin.headers["authorization"]}
        self.session = requests.Session()
        self.client = httpx.Client(base_url=made.url, timeout=30)

    def restore(self) -> None:
        """What requests have deleted is there again."""
        self._copy.close()
        manager = self._portal.wrap_async_context_manager(self._made.copy())
        self._plane = self._copy.enter_context(manager)

    def dump(self) -> dict[str, list[str]]:
        """What the database holds, but for when keys were used and what was answered."""
        return self._portal.call(partial(dump, self._plane.database, but=("key_uses",)))

    def close(self) -> None:
        self._copy.close()
        self.session.close()
        self.client.close()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedPlane]:
    folder = tmp_path_factory.mktemp("fuzz")
    with (
        recorder_on_thread(folder) as (portal, made),
        closing(ThreadedPlane(portal, made)) as plane,
    ):
        yield plane


@pytest.mark.full
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_is_as_documented(plane: ThreadedPlane, method: str, path: str) -> None:
    operation = SCHEMA[path][method]
    plane.restore()
    names = [parameter.name for parameter in operation.path_parameters]
    known = {name: plane.known[name] for name in names}
    if path.startswith("/admin/v1/models/"):
        known["name"] = plane.known["model"]
    query: dict[str, Any] = {}
    if any(parameter.name == "tenant" for parameter in operation.query):
        query = {"query": {"tenant": plane.known["tenant"]}}
    cases = st.one_of(
        # What is there, on no condition; the others seldom meet it.
        operation.as_strategy(GenerationMode.POSITIVE, path_parameters=known, headers={}, **query),
        operation.as_strategy(GenerationMode.POSITIVE, path_parameters=known),
        operation.as_strategy(GenerationMode.POSITIVE),
        operation.as_strategy(GenerationMode.NEGATIVE),
    )

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def send(case: Any) -> None:
        answer = case.call(base_url=plane.url, session=plane.session, headers=plane.headers)
        excluded = list(EXCLUDED)
        sent = dict(parse_qsl(urlsplit(answer.request.url).query, keep_blank_values=True))
        if not set(case.query or {}) <= sent.keys():
            # What makes it wrong, such as a parameter that is an empty list, was not sent.
            excluded.append(checks.negative_data_rejection)
        if path.startswith("/v1/organization/"):
            # Lists of ids: in a query any value is a list of one.
            excluded.append(checks.negative_data_rejection)
        case.validate_response(answer, headers=plane.headers, excluded_checks=excluded)

    send()
