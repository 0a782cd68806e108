"""The whole product with a tiny model, for tests that need nothing else of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.tiny import Tiny
from tests.stack import Stack, running


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def stack(tiny: Tiny) -> Iterator[Stack]:
    with running(tiny.stack(memory="8MiB")) as stack:
        yield stack
