"""Base models that come to this machine, or do not."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast
from weakref import ref

import pytest

from adapters.store.folder import StoreUnavailable
from workers.base_models.fetcher import RETRY_S, ModelFetcher
from workers.base_models.served_model import ServedModel

DIGEST = "0" * 64


def make_fetcher(
    build: Callable[[str, str], ServedModel], clock: Callable[[], float]
) -> ModelFetcher:
    thread = ThreadPoolExecutor(1)
    return ModelFetcher(
        build, thread=thread, is_final=lambda error: isinstance(error, KeyError), clock=clock
    )


class Built:
    """A model, as a fetcher sees it."""

    def __init__(self) -> None:
        self.is_closed = threading.Event()

    def close(self) -> None:
        self.is_closed.set()


@pytest.mark.parametrize(
    ("error", "reason", "is_final"),
    [
        (OSError(24, "Too many open files"), "[Errno 24] Too many open files", False),
        (MemoryError(), "MemoryError", False),
        (ValueError("bad"), "bad", False),
        (KeyError("head"), "'head'", True),
    ],
)
def test_what_fails_to_be_built_fails_by_name_and_is_tried_again(
    error: Exception, reason: str, is_final: bool
) -> None:
    now, errors, built = 0.0, [error], Built()

    def build(digest: str, name: str) -> ServedModel:
        if errors:
            raise errors.pop()
        return cast(ServedModel, built)

    fetcher = make_fetcher(build, lambda: now)
    fetcher.fetch(DIGEST, "tiny")
    fetcher._thread.submit(int).result(60)
    assert fetcher.take() == []
    fetch = fetcher.fetches[DIGEST]
    assert (fetch.error, fetch.is_unsatisfiable) == (reason, is_final)
    now = RETRY_S
    assert fetcher.take() == []
    fetcher._thread.submit(int).result(60)
    assert fetcher.take() == [built] and not fetcher.fetches


def test_a_model_that_is_built_for_nobody_is_closed() -> None:
    """The catalog has dropped it in the meantime, or the worker ends."""
    started, released, built = threading.Event(), threading.Event(), Built()

    def build(digest: str, name: str) -> ServedModel:
        started.set()
        assert released.wait(60)
        return cast(ServedModel, built)

    fetcher = make_fetcher(build, lambda: 0.0)
    fetcher.fetch(DIGEST, "tiny")
    assert started.wait(60)
    fetcher.forget(set())
    assert not fetcher.fetches and not built.is_closed.is_set()
    released.set()
    assert built.is_closed.wait(60)


def test_what_a_failed_fetch_had_read_is_gone_with_it() -> None:
    """At once, not when garbage is collected some day: it is tried again every half minute."""
    held: list[ref[set[str]]] = []

    def build(digest: str, name: str) -> ServedModel:
        parts = {digest}
        held.append(ref(parts))
        raise StoreUnavailable("the store is away")

    fetcher = make_fetcher(build, lambda: 0.0)
    gc.disable()
    try:
        fetcher.fetch(DIGEST, "tiny")
        deadline = time.monotonic() + 60
        while not fetcher.fetches[DIGEST].error and time.monotonic() < deadline:
            assert fetcher.take() == []
        assert fetcher.fetches[DIGEST].error == "the store is away"
        assert [one() for one in held] == [None]
    finally:
        gc.enable()
        fetcher.close()


def test_a_first_try_is_told_from_those_after_it() -> None:
    """What waits for the first does not wait for a store that stays away."""
    released, now = threading.Event(), 0.0

    def build(digest: str, name: str) -> ServedModel:
        assert released.wait(60)
        raise StoreUnavailable("the store is away")

    fetcher = make_fetcher(build, lambda: now)
    assert not fetcher.is_first_try
    fetcher.fetch(DIGEST, "tiny")
    assert fetcher.take() == [] and fetcher.is_first_try
    released.set()
    future = fetcher.fetches[DIGEST].future
    assert future is not None and isinstance(future.exception(60), StoreUnavailable)
    assert fetcher.take() == [] and not fetcher.is_first_try
    now = RETRY_S
    assert fetcher.take() == [] and fetcher.fetches[DIGEST].future is not None
    assert not fetcher.is_first_try
    fetcher.close()
