"""Cancelled and failed loads of base models and of adapters give back all that they took, at once
and without the collector of cycles."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any
from unittest.mock import patch

import pytest
import torch

from adapters.store.folder import LocalStore
from tests.doubles import make_model
from tests.workers.base_models.test_swapping import StoredModels, tiers
from tests.workers.driver import Driver
from workers.base_models import loader
from workers.base_models.loader import resident_bytes
from workers.base_models.served_model import ServedModel
from workers.base_models.served_models import ServedModels
from workers.device.device_memory import AddressRange
from workers.device.weight_image import WeightImage
from workers.importer import import_model
from workers.models.plan import ModelPlan
from workers.models.progress import ByteProgress
from workers.wire.frames import Abort, Desired, DesiredModel
from workers.wire.protocol import ErrorCode, FinishReason

pytestmark = pytest.mark.full

ROUNDS = 200
ALLOWED_BYTES = 40 << 20
"""Growth of the process that is allowed after all rounds: about two loads."""
KINDS = ("cancelled", "loaded", "exhausted", "runner", "attached", "kept")
"""cancelled: at a random point. loaded: cancelled when all is loaded, and nothing is on the device.
exhausted: MemoryError at a random point. The others fail in a step that follows a whole load."""
FORMS: dict[str, dict[str, Any]] = {
    "files": {},
    "kept": {"runs_ahead": True, "uses_graphs": True, "keeps_weights": True},
}


class StoredLargeModel(StoredModels):
    """One model of some 16 MB, so that a load that is kept shows in the memory of the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = LocalStore(folder / "store")
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
        digest = import_model(make_model(folder / "one", "llama", **sizes), self.store)
        self.digests = {"one": digest}
        self.plans = {"one": ModelPlan.read(self.store.model_folder(digest), digest, torch.float32)}
        self.refs = {"one": []}


def fail(*_: object) -> Any:
    """In place of a mock, which would keep its arguments."""
    raise RuntimeError("injected")


class Rounds:
    """Loads of the model `one` that end as `kind` says at the point, a part of all bytes."""

    def __init__(self, driver: Driver, stored: StoredModels) -> None:
        self._driver, self._stored = driver, stored
        self._model = driver.worker.instances[stored.digests["one"]]
        self._number = 0
        self._kind, self._point = "", 0.0
        self._is_released = Event()
        self._load, self._release = loader.load_model, ServedModels._release

    def play(self, kind: str, point: float) -> None:
        self._kind, self._point = kind, point
        self._number += 1
        self._is_released.clear()
        with (
            self._failure(),
            patch.object(loader, "load_model", self._watched),
            patch.object(ServedModels, "_release", self._released),
        ):
            self._driver.submit(self._stored.generate(self._number, "one", [1, 2, 3], 2))
            self._driver.wait()
            assert self._is_released.wait(60), kind
        expected = FinishReason.ABORT if kind in KINDS[:2] else ErrorCode.MODEL_UNAVAILABLE
        assert self._driver.ended[self._number] == expected, kind
        self._driver.worker.served._loader._thread.submit(lambda: None).result(60)
        while tiers(self._driver)["one"] != "host":
            sleep(0.001)

    def _failure(self) -> AbstractContextManager[Any]:
        match self._kind:
            case "runner":
                return patch.object(self._model, "make_runner", fail)
            case "attached":
                return patch.object(ServedModel, "attach", fail)
            case "kept":
                return patch.object(ServedModels, "_attach", self._attach_and_fail)
            case "mapped":
                return patch.object(AddressRange, "back", fail)
            case "copied":
                return patch.object(WeightImage, "_copy", fail)
            case _:
                return nullcontext()

    def _attach_and_fail(self, model: ServedModel, runner: Any, load_s: float) -> None:
        """As if the last step of a load failed, when the model is served already."""
        if model.image is not None:
            model.image.bring()
        with self._driver.worker.memory.broker.lock:
            model.attach(runner)
        fail()

    def _released(self, model: ServedModel) -> None:
        self._release(self._driver.worker.served, model)
        self._is_released.set()

    def _watched(
        self, plan: ModelPlan, ops: Any, *, image: WeightImage | None, progress: ByteProgress
    ) -> Any:
        def watch(done: int, total: int) -> None:
            progress(done, total)
            if done >= self._point * total:
                if self._kind == "exhausted":
                    raise MemoryError
                if self._kind == "cancelled":
                    self._cancel()
                    progress(done, total)

        model = self._load(plan, ops, image=image, progress=watch)
        if self._kind == "loaded":
            self._cancel()
        return model

    def _cancel(self) -> None:
        """Returns when the engine has cancelled the load that calls this."""
        self._driver.loop.post(0, Abort(self._number))
        assert self._is_released.wait(60)


@pytest.mark.parametrize("form", FORMS)
def test_the_memory_is_flat_over_cancelled_and_failed_loads_of_a_model(
    tmp_path: Path, form: str, without_collector: None
) -> None:
    rng = random.Random(7)
    stored = StoredLargeModel(tmp_path)
    kinds = [*KINDS, "mapped", "copied"] if form == "kept" else KINDS
    unloaded = DesiredModel(stored.digests["one"], "one", is_unloaded=True)
    wanted = DesiredModel(stored.digests["one"], "one")
    with Driver(stored.config("one", room=2, **FORMS[form])) as driver:
        worker = driver.worker
        worker.served._residency._retry_after_s = 0.0
        driver.run(stored.generate(0, "one", [1, 2, 3], 8))
        driver.loop.post(1, Desired(1, [], [unloaded]))
        while tiers(driver)["one"] != "host":
            sleep(0.001)
        driver.loop.post(1, Desired(2, [], [wanted]))
        driver.await_status(lambda s: s.generation == 2)
        rounds = Rounds(driver, stored)
        for kind in kinds:  # What every kind needs once, such as the libraries of a traceback.
            rounds.play(kind, 0.9)
        before, image = resident_bytes(), worker.instances[stored.digests["one"]].image
        for number in range(ROUNDS):
            rounds.play(kinds[number % len(kinds)], rng.random())
            assert "w" not in worker.memory.arena.map()
            assert not worker.served._host.num_bytes
            assert image is None or not len(image._host)
        grown = resident_bytes() - before
        print(f"{form}: {ROUNDS} rounds, grown by {grown >> 20} MiB")
        assert grown < ALLOWED_BYTES
        driver.run(stored.generate(1 << 20, "one", [1, 2, 3], 8))
        assert driver.answers[1 << 20] == driver.answers[0], "it is served as before"
