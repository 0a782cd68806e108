"""Base models that come to this machine, or do not."""

from __future__ import annotations

import gc
import threading
import time
from weakref import ref

from adapters.store.folder import StoreUnavailable
from workers.base_models.fetcher import RETRY_S, ModelFetcher
from workers.models.plan import ModelPlan

DIGEST = "0" * 64


def test_what_a_failed_fetch_had_read_is_gone_with_it() -> None:
    """At once, not when garbage is collected some day: it is tried again every half minute."""
    held: list[ref[set[str]]] = []

    def read(digest: str) -> ModelPlan:
        parts = {digest}
        held.append(ref(parts))
        raise StoreUnavailable("the store is away")

    fetcher = ModelFetcher(read, clock=lambda: 0.0)
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

    def read(digest: str) -> ModelPlan:
        assert released.wait(60)
        raise StoreUnavailable("the store is away")

    fetcher = ModelFetcher(read, clock=lambda: now)
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
