"""Fetches of the catalog's base models to this machine, on a thread."""

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
    """Fetch of one model. error: why the last try failed; the next one is at retry_s.
    is_unsatisfiable: whether this worker's configuration cannot serve the model."""

    name: str
    future: Future[ModelPlan] | None
    error: str = ""
    retry_s: float = 0.0
    is_unsatisfiable: bool = False


class ModelFetcher:
    """Fetcher of models, used on the engine thread. read: fetches a digest from the store and
    returns its plan; may be slow and raise."""

    def __init__(self, read: Callable[[str], ModelPlan], *, clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model-fetcher")
        self.fetches: dict[str, Fetch] = {}
        """Unregistered models by digest."""

    @property
    def is_busy(self) -> bool:
        """Whether a fetch is running or due for a retry."""
        now = self._clock()
        return any(f.future is not None or now >= f.retry_s for f in self.fetches.values())

    @property
    def is_first_try(self) -> bool:
        """Whether a fetch is running that has not failed before."""
        return any(f.future is not None and not f.error for f in self.fetches.values())

    def fetch(self, digest: str, name: str) -> None:
        """Starts to fetch the model, unless it is being fetched already."""
        if digest not in self.fetches:
            self.fetches[digest] = Fetch(name, self._thread.submit(self._read, digest))

    def forget(self, wanted: set[str]) -> None:
        """Cancels and forgets all fetches except those of `wanted`."""
        for digest in self.fetches.keys() - wanted:
            fetch = self.fetches.pop(digest)
            if fetch.future is not None:
                fetch.future.cancel()

    def take(self) -> list[tuple[str, ModelPlan]]:
        """Returns (name, plan) of each finished fetch and restarts failed ones that are due. The
        caller then calls `registered` or `fail` for each."""
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
                    # Otherwise the future and the error would reference each other through this
                    # frame.
                    fetch.future = None
                    self.fail(digest, fetch.name, error, is_unsatisfiable=is_unsupported)
        return come

    def registered(self, digest: str) -> None:
        """Forgets the fetch of a model that is now registered."""
        del self.fetches[digest]

    def fail(
        self, digest: str, name: str, error: Exception, *, is_unsatisfiable: bool = False
    ) -> None:
        """Records that the model cannot be served and schedules a retry, because memory may become
        free. Each reason is logged once."""
        reason = "not in the store" if isinstance(error, NotInStore) else str(error)
        if reason != self.fetches[digest].error:
            log.warning("model %s (%s): %s", name, digest[:12], reason)
        retry_s = self._clock() + RETRY_S
        self.fetches[digest] = Fetch(name, None, reason, retry_s, is_unsatisfiable)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
