"""Base models that the catalog names come to this machine, on a thread of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from adapters.store.folder import NotInStore
from workers.models.plan import ModelPlan
from workers.models.spec import UnsupportedModel

log = logging.getLogger(__name__)

RETRY_S = 30.0


@dataclass(slots=True)
class Fetch:
    """One model that is not here yet. error: why the last try failed, tried again at retry_s.
    is_unsatisfiable: this worker, as it is set up, cannot serve the model."""

    name: str
    future: Future[ModelPlan] | None
    error: str = ""
    retry_s: float = 0.0
    is_unsatisfiable: bool = False


class ModelFetcher:
    """Used on the engine thread. read: the plan of a digest, fetched from the store; may take long
    and raise."""

    def __init__(self, read: Callable[[str], ModelPlan], *, clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model-fetcher")
        self.fetches: dict[str, Fetch] = {}
        """By digest."""

    @property
    def is_busy(self) -> bool:
        """One is on its way, or it is time to try again."""
        now = self._clock()
        return any(f.future is not None or now >= f.retry_s for f in self.fetches.values())

    @property
    def is_first_try(self) -> bool:
        """One is on its way that has not failed before."""
        return any(f.future is not None and not f.error for f in self.fetches.values())

    def fetch(self, digest: str, name: str) -> None:
        """Harmless twice."""
        if digest not in self.fetches:
            self.fetches[digest] = Fetch(name, self._thread.submit(self._read, digest))

    def forget(self, wanted: set[str]) -> None:
        """All but these."""
        for digest in self.fetches.keys() - wanted:
            fetch = self.fetches.pop(digest)
            if fetch.future is not None:
                fetch.future.cancel()

    def take(self) -> list[tuple[str, ModelPlan]]:
        """Those that have come, with their names; others are tried again when it is time. Each is
        then told to be `registered`, or to `fail`."""
        come: list[tuple[str, ModelPlan]] = []
        for digest, fetch in list(self.fetches.items()):
            if fetch.future is None:
                if self._clock() >= fetch.retry_s:
                    fetch.future = self._thread.submit(self._read, digest)
            elif fetch.future.done():
                try:
                    come.append((fetch.name, fetch.future.result()))
                except Exception as error:
                    is_unsupported = isinstance(error, UnsupportedModel)
                    # Or else it and the error, by way of this frame, would hold each other.
                    fetch.future = None
                    self.fail(digest, fetch.name, error, is_unsatisfiable=is_unsupported)
        return come

    def registered(self, digest: str) -> None:
        """The model is served here."""
        del self.fetches[digest]

    def fail(
        self, digest: str, name: str, error: Exception, *, is_unsatisfiable: bool = False
    ) -> None:
        """The model cannot be served; it is tried again, for memory may come free. A reason is
        logged once."""
        reason = "not in the store" if isinstance(error, NotInStore) else str(error)
        if reason != self.fetches[digest].error:
            log.warning("model %s (%s): %s", name, digest[:12], reason)
        retry_s = self._clock() + RETRY_S
        self.fetches[digest] = Fetch(name, None, reason, retry_s, is_unsatisfiable)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
