"""Fetches the catalog's base models to this machine on a separate thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from adapters.store.folder import NotInStore
from workers.base_models.served_model import ServedModel

log = logging.getLogger(__name__)

RETRY_S = 30.0


@dataclass(slots=True)
class Fetch:
    """Fetch of one model. future: running attempt, or None between attempts. error: reason of the
    last failure, or an empty string. retry_s: time of the next attempt. is_unsatisfiable: whether
    this worker's configuration cannot serve the model."""

    name: str
    future: Future[ServedModel] | None
    error: str = ""
    retry_s: float = 0.0
    is_unsatisfiable: bool = False


class ModelFetcher:
    """Fetcher and builder of models. Its methods are called on the engine thread."""

    def __init__(
        self,
        build: Callable[[str, str], ServedModel],
        *,
        thread: Executor,
        is_final: Callable[[Exception], bool],
        clock: Callable[[], float],
    ) -> None:
        """build: function of a digest and a name, which fetches the model with this digest from the
        store and builds it under this name. It may be slow. If it raises, it frees all that it has
        built. thread: executor of `build`. is_final: function that returns whether an error of
        `build` means that this worker's configuration cannot serve the model."""
        self._build = build
        self._thread = thread
        self._is_final = is_final
        self._clock = clock
        self.fetches: dict[str, Fetch] = {}
        """Fetches of models that are not registered yet, by digest."""

    @property
    def is_first_try(self) -> bool:
        """Whether the first attempt to fetch a model is running. Later attempts do not count."""
        return any(f.future is not None and not f.error for f in self.fetches.values())

    def fetch(self, digest: str, name: str) -> None:
        """Starts to fetch the model unless it is already being fetched."""
        if digest not in self.fetches:
            self.fetches[digest] = Fetch(name, self._thread.submit(self._build, digest, name))

    def forget(self, wanted: set[str]) -> None:
        """Cancels and forgets the fetches of all models whose digests are not in `wanted`."""
        for digest in self.fetches.keys() - wanted:
            self._drop(self.fetches.pop(digest))

    def take(self) -> list[ServedModel]:
        """Returns the models whose fetches have finished. Restarts failed fetches at their retry
        times, because the memory that they lacked may have become free."""
        models: list[ServedModel] = []
        for digest, fetch in list(self.fetches.items()):
            if fetch.future is None:
                if self._clock() >= fetch.retry_s:
                    fetch.future = self._thread.submit(self._build, digest, fetch.name)
            elif fetch.future.done():
                try:
                    models.append(fetch.future.result())
                    del self.fetches[digest]
                except Exception as error:
                    # The future is dropped, because the future and its error form a reference cycle
                    # through this frame.
                    fetch.future = None
                    self._fail(digest, fetch, error)
        return models

    def close_model(self, model: ServedModel) -> None:
        """Closes an unregistered model on the thread that fetches models."""
        self._thread.submit(model.close)

    def close(self) -> None:
        """Drops all fetches, without waiting for the running fetch."""
        self.forget(set())

    def _fail(self, digest: str, fetch: Fetch, error: Exception) -> None:
        """Records why the model cannot be served. Logs the reason if it has changed."""
        reason = "not in the store" if isinstance(error, NotInStore) else str(error)
        reason = reason or type(error).__name__
        if reason != fetch.error:
            log.warning("model %s (%s): %s", fetch.name, digest[:12], reason)
        fetch.error, fetch.is_unsatisfiable = reason, self._is_final(error)
        fetch.retry_s = self._clock() + RETRY_S

    def _drop(self, fetch: Fetch) -> None:
        if fetch.future is not None and not fetch.future.cancel():
            fetch.future.add_done_callback(_close_result)


def _close_result(future: Future[ServedModel]) -> None:
    if future.exception() is None:
        future.result().close()
