"""Loads and frees weights on a separate thread, while the engines continue to run steps."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from memory.errors import release_frames
from ops.base import Ops
from workers.device.weight_image import WeightImage
from workers.models.loading import LoadedModel, load_model
from workers.models.plan import ModelPlan
from workers.models.progress import ByteProgress

log = logging.getLogger(__name__)


class LoadCancelled(Exception):
    """Error that ends a load after `WeightLoad.cancel` was called."""


@dataclass(frozen=True, slots=True)
class Loaded:
    model: LoadedModel
    seconds: float


class WeightLoad:
    """Running load of one model's weights. If the load fails or is cancelled, `result` raises
    CheckpointError, OSError, MemoryError or LoadCancelled."""

    def __init__(self, thread: Executor, read: Callable[[ByteProgress], Loaded]) -> None:
        """read: function that loads the weights and calls its argument after each tensor."""
        self._is_cancelled = False
        self._future = thread.submit(read, self._check)

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def result(self) -> Loaded:
        """Returns the loaded model, after waiting for the load. Raises the error that ended it."""
        return self._future.result()

    def cancel(self) -> None:
        """Stops the load before its next tensor. The caller frees what is loaded already, with
        `ModelLoader.discard`, because the load may have finished."""
        self._is_cancelled = True
        self._future.cancel()

    def _check(self, _done: int = 0, _total: int = 0) -> None:
        if self._is_cancelled:
            raise LoadCancelled


class ModelLoader:
    """Loader of one model at a time. It uses one kernel thread, so that the other cores are left to
    the engines."""

    def __init__(self, ops: Ops, thread: Executor) -> None:
        self._ops = ops
        self._thread = thread

    def load(self, plan: ModelPlan, image: WeightImage | None) -> WeightLoad:
        """Starts to load weights into the image, or to the device if the image is None. The extents
        of the weights must have been allocated."""
        return WeightLoad(self._thread, partial(self.load_here, plan, image))

    def load_here(
        self, plan: ModelPlan, image: WeightImage | None, progress: ByteProgress
    ) -> Loaded:
        """Loads weights on the calling thread, with that thread's number of kernel threads."""
        before = resident_bytes()
        begin = perf_counter()
        try:
            model = load_model(plan, self._ops, image=image, progress=progress)
        except BaseException as error:
            if image is not None:
                image.drop()
            release_frames(error)
            raise
        seconds = perf_counter() - begin
        log.info(
            "model %s (%s): loaded in %.2f s, %d MiB of weights, process from %d to %d MiB",
            *(plan.digest[:12], plan.shape.served_by, seconds, model.num_bytes >> 20),
            *(before >> 20, resident_bytes() >> 20),
        )
        return Loaded(model, seconds)

    def discard(self, digest: str, held: list[object], image: WeightImage | None) -> None:
        """Clears the list `held` on the loader thread, so that the objects in the list are freed,
        and empties the image. Then trims the heap (`malloc_trim`). The loader thread does all this
        after the loads that were started earlier, even cancelled ones, have ended, and before the
        loads that are started later."""
        self._thread.submit(_discard, digest, held, image)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def resident_bytes() -> int:
    """Returns the physical memory of this process in bytes, or 0 if it is unknown."""
    path = Path("/proc/self/statm")
    if not path.exists():
        return 0
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _discard(digest: str, held: list[object], image: WeightImage | None) -> None:
    before = resident_bytes()
    held.clear()
    if image is not None:
        image.drop()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
    log.info(
        "model %s: unloaded, the process went from %d to %d MiB",
        *(digest[:12], before >> 20, resident_bytes() >> 20),
    )
