"""Several base models on one worker that has room for one: answers are those of workers that never
swap, streams are never cut, and what cannot be loaded harms nobody else."""

from __future__ import annotations

import gc
import json
import random
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any

import msgspec
import pytest
import torch

from adapters.manifest import BaseModelShape
from adapters.reference import AdapterRef
from adapters.store.folder import LocalStore
from memory.eviction.adapter_memory import UNIT_BYTES
from ops.base import PackedLinear
from ops.block_matrix import Weight
from ops.registry import select
from tests.doubles import make_adapter, make_model, write_adapter
from tests.scale import scaled
from tests.workers.driver import Driver, store_adapter
from tests.workers.formed_worker import FormedConfig
from workers.base_models import fetcher
from workers.base_models.served_model import ServedModel
from workers.device.device_memory import AddressRange
from workers.execution.batch import ModelBuffers
from workers.execution.graph_runner import GraphRunner
from workers.execution.model_runner import ModelRunner
from workers.importer import import_model
from workers.models.plan import ModelPlan
from workers.observe.status import check_integrity
from workers.process import loop
from workers.process.config import WorkerConfig
from workers.process.errors import CannotServe
from workers.process.model_builder import buffer_bytes
from workers.wire import grammars
from workers.wire.frames import Abort, Desired, DesiredModel
from workers.wire.protocol import ErrorCode, FinishReason, Generate, SamplingParams
from workers.wire.status import ModelStatus, WorkerStatus, why_unsatisfiable

pytestmark = pytest.mark.full

FAMILIES = {"one": "llama", "two": "starcoder2", "three": "gemma3_text"}
KV_EXTENTS = 6
"""Beside the weights of the largest: eight pages each."""


class StoredModels:
    """Three tiny models in one store, with two adapters each."""

    def __init__(self, folder: Path, families: dict[str, str] = FAMILIES) -> None:
        self.folder = folder
        self.store = LocalStore(folder / "store")
        self.digests: dict[str, str] = {}
        self.refs: dict[str, list[AdapterRef]] = {}
        self.shapes: dict[str, BaseModelShape] = {}
        self.plans: dict[str, ModelPlan] = {}
        for seed, (name, family) in enumerate(families.items()):
            source = make_model(folder / name, family, seed=seed)
            digest = self.digests[name] = import_model(source, self.store)
            model = self.store.model_folder(digest)
            config = json.loads((model / "config.json").read_text())
            shape = BaseModelShape.from_config(config, digest)
            self.shapes[name] = shape
            self.plans[name] = ModelPlan.read(model, digest, torch.float32)
            self.refs[name] = [
                store_adapter(
                    self.store,
                    make_adapter(source, folder / f"{name}-{rank}", rank=rank, b_std=0.5),
                    shape,
                )
                for rank in (4, 8)
            ]

    def config(self, *names: str, room: int = 1, **changes: object) -> WorkerConfig:
        """room: so many of the largest models fit."""
        largest = max(plan.max_bytes(select("cpu")) for plan in self.plans.values())
        extents = -(-largest // UNIT_BYTES)
        settings = {
            "models": {name: self.digests[name] for name in names},
            "store": str(self.folder / "store"),
            "cache_dir": self.folder / "cache",
            "listen": "",
            "dtype": "float32",
            "threads": 1,
            "memory": 64 << 20,
            "device_memory": (room * extents + KV_EXTENTS) * UNIT_BYTES,
            "max_model_wait_s": 0.3,
            "max_model_drain_s": 0.02,
            "max_num_seqs": 8,
            "max_batched_tokens": 64,
            **changes,
        }
        config = FormedConfig(**settings)  # pyright: ignore
        if not config.keeps_weights or "device_memory" in changes:
            return config
        buffers = [buffer_bytes(config, self.plans[name], uses_graphs=False) for name in names]
        return msgspec.structs.replace(
            config,
            device_memory=settings["device_memory"] + -(-sum(buffers) // UNIT_BYTES) * UNIT_BYTES,
        )

    def generate(
        self,
        number: int,
        name: str,
        prompt: list[int],
        max_tokens: int,
        adapter: AdapterRef | None = None,
    ) -> Generate:
        params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        return Generate(
            number, "", self.digests[name], prompt, params, cache_domain="t", adapter=adapter
        )


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredModels]:
    yield StoredModels(tmp_path_factory.mktemp("models"))


def models(status: WorkerStatus) -> dict[str, ModelStatus]:
    return {model.name: model for model in status.models}


def traffic(stored: StoredModels, names: list[str], count: int, num_tokens: int) -> list[Generate]:
    """Of the base models and of adapters, with prefixes that come again."""
    rng = random.Random(3)
    shared = [rng.randrange(256) for _ in range(40)]
    requests: list[Generate] = []
    for number in range(count):
        name = names[number % len(names)]
        own = [rng.randrange(256) for _ in range(rng.randrange(1, 20))]
        prompt = (shared if rng.random() < 0.5 else []) + own
        ref = rng.choice([None, *stored.refs[name]])
        requests.append(stored.generate(number, name, prompt, num_tokens, ref))
    return requests


def answers(config: WorkerConfig, requests: list[Generate]) -> tuple[dict[int, list[int]], Driver]:
    with Driver(config) as driver:
        driver.run(*requests)
    assert set(driver.ended.values()) == {FinishReason.LENGTH}
    return driver.answers, driver


FORMS = {
    "in-turn": {},
    "ahead": {"runs_ahead": True},
    "as-on-a-gpu": {"runs_ahead": True, "uses_graphs": True, "keeps_weights": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_of_a_worker_that_never_swaps(stored: StoredModels, form: str) -> None:
    """More streams than one residency can end: they are preempted with their model, and go on.
    Where weights are kept, an access to an extent that they have would end the process."""
    names = list(FAMILIES)
    requests = traffic(stored, names, scaled(48, 192), scaled(120, 240))
    expected, _ = answers(stored.config(*names, device_memory=None), requests)
    got, driver = answers(stored.config(*names, **FORMS[form]), requests)
    assert got == expected
    worker = driver.worker
    status = models(worker.status(False, 0))
    assert all(model.num_swaps >= 2 for model in status.values()), status
    assert sum(model.num_preemptions for model in status.values()) > 0
    for instance in worker.instances.values():
        check_integrity(instance.engine, instance.pool, instance.report)
        assert instance.report.num_integrity_failures == 0
    extents = worker.memory.arena.map()
    on_device = [m for m in status.values() if m.tier == "device"]
    assert len(on_device) == 1
    num_weights = extents.count("w") * worker.memory.arena.extent_bytes
    assert on_device[0].num_bytes <= num_weights < 1.6 * on_device[0].num_bytes


def test_all_stay_where_there_is_room_for_all(stored: StoredModels) -> None:
    names = list(FAMILIES)
    requests = traffic(stored, names, 12, 16)
    _, driver = answers(stored.config(*names, room=3), requests)
    status = models(driver.worker.status(False, 0))
    assert {(m.tier, m.num_swaps) for m in status.values()} == {("device", 1)}


def test_a_cold_model_comes_and_the_idle_one_leaves(stored: StoredModels) -> None:
    with Driver(stored.config("one", "two")) as driver:
        assert tiers(driver) == {"one": "device", "two": "host"}
        driver.run(stored.generate(0, "two", [1, 2, 3], 4))
        status = driver.await_status(lambda s: models(s)["two"].num_swaps == 1)
        assert {n: m.tier for n, m in models(status).items()} == {"one": "host", "two": "device"}
        assert models(status)["two"].load_s > 0 and models(status)["two"].num_bytes > 0
    assert driver.ended == {0: FinishReason.LENGTH}


def test_kept_weights_are_read_once_and_what_was_captured_for_them_stays(
    stored: StoredModels, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(stored.folder / "store", store)
    form = {"store": str(store), **FORMS["as-on-a-gpu"]}
    names = ("one", "two")
    requests = [stored.generate(n, names[n % 2], [1, 2, 3], 8) for n in range(6)]
    with Driver(stored.config(*names, **form)) as driver:
        runners: dict[str, set[int]] = {name: set() for name in names}
        for request in requests:
            driver.run(request)
            for name in names:
                runners[name].add(id(driver.worker.instances[stored.digests[name]].engine.runner))
            if request.id == 1:
                for name in names:
                    shutil.rmtree(store / "models" / stored.digests[name])
    assert set(driver.ended.values()) == {FinishReason.LENGTH}
    assert driver.answers[0] == driver.answers[2] == driver.answers[4]
    assert driver.answers[1] == driver.answers[3] == driver.answers[5]
    assert all(len(found - {id(None)}) == 1 for found in runners.values())
    assert {m.num_swaps for m in driver.worker.status(False, 0).models} == {3}


def test_graphs_of_a_model_that_comes_later_are_captured_one_between_two_steps(
    stored: StoredModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the sequences of another model wait for one at a time, and when all weights are
    there. Those of a model that is there at the start are captured before."""
    turns, captures = [0], list[int]()
    step, capture = loop.WorkerLoop._step, GraphRunner.capture_next

    def counted_step(self: loop.WorkerLoop) -> Any:
        turns[0] += 1
        return step(self)

    def noted_capture(self: GraphRunner) -> None:
        captures.append(turns[0])
        capture(self)

    monkeypatch.setattr(loop.WorkerLoop, "_step", counted_step)
    monkeypatch.setattr(GraphRunner, "capture_next", noted_capture)
    with Driver(stored.config("one", "two", room=2, **FORMS["as-on-a-gpu"])) as driver:
        instances = [driver.worker.instances[stored.digests[name]] for name in ("one", "two")]
        at_start = len(captures)
        assert set(captures) == {0} and not any(each.can_capture for each in instances)
        three = DesiredModel(stored.digests["three"], "three")
        wanted = [DesiredModel(stored.digests[name], name) for name in ("one", "two")]
        driver.loop.post(1, Desired(1, [], [*wanted, three]))
        driver.await_status(lambda s: "three" in models(s))
        driver.submit(stored.generate(0, "one", [1, 2, 3], 100))
        driver.submit(stored.generate(1, "three", [1, 2, 3], 8))
        driver.wait()
        later = driver.worker.instances[stored.digests["three"]]
        deadline = monotonic() + 60
        while later.can_capture and monotonic() < deadline:
            sleep(0.01)
    assert set(driver.ended.values()) == {FinishReason.LENGTH}
    assert isinstance(later.graphs, GraphRunner)
    assert len(later.graphs._graphs) == len(captures) - at_start > 10
    assert len(set(captures[at_start:])) == len(captures) - at_start
    later.graphs._missing.append(next(iter(later.graphs._graphs)))
    assert later.can_capture
    later.copy_begun_s = 0.0
    assert not later.can_capture, "not before all weights are there"
    later.copy_begun_s = None
    later.state.tier = "draining"
    assert not later.can_capture, "not while it is to leave the device"
    later.state.tier, later.state.is_named = "device", False
    assert not later.can_capture, "nor while it is to be unregistered"


def test_kept_weights_are_bounded(stored: StoredModels) -> None:
    """With room on the host for one model of three, the others are read again, and answer alike."""
    names = list(FAMILIES)
    requests = [stored.generate(n, names[n % 3], [1, 2, 3], 8) for n in range(9)]
    largest = max(plan.max_bytes(select("cpu")) for plan in stored.plans.values())
    config = stored.config(*names, host_model_memory=largest, **FORMS["as-on-a-gpu"])
    runners: dict[str, set[int]] = {name: set() for name in names}
    kept: list[object] = []
    with Driver(config) as driver:
        for request in requests:
            driver.run(request)
            for name in names:
                runner = driver.worker.instances[stored.digests[name]].engine.runner
                if runner is not None:
                    # Alive, so that no later one has its id.
                    kept.append(runner)
                    runners[name].add(id(runner))
    assert set(driver.ended.values()) == {FinishReason.LENGTH}
    for number in range(3):
        assert driver.answers[number] == driver.answers[number + 3] == driver.answers[number + 6]
    counts = sorted(len(found) for found in runners.values())
    assert counts[-1] > 1, "none was read again"


def test_an_unloaded_model_is_not_kept(stored: StoredModels, without_collector: None) -> None:
    """Nor are the graphs that were captured for it: they are freed without the collector of cycles,
    which looks at nothing that was made before the worker was ready."""
    one = stored.digests["one"]
    wanted, unloaded = DesiredModel(one, "one"), DesiredModel(one, "one", is_unloaded=True)
    with Driver(stored.config("one", **FORMS["as-on-a-gpu"])) as driver:
        is_freed = Event()
        weakref.finalize(driver.worker.instances[one].engine.runner, is_freed.set)
        driver.run(stored.generate(0, "one", [1, 2, 3], 8))
        driver.loop.post(1, Desired(1, [], [unloaded]))
        driver.await_status(lambda s: models(s)["one"].tier == "host")
        assert is_freed.wait(60)
        driver.loop.post(1, Desired(2, [], [wanted]))
        driver.await_status(lambda s: s.generation == 2)
        driver.run(stored.generate(1, "one", [1, 2, 3], 8))
        assert driver.answers[0] == driver.answers[1]
        assert driver.worker.instances[one].engine.runner is not None


def tiers(driver: Driver) -> dict[str, str]:
    return {m.name: m.tier for m in driver.worker.status(False, 0).models}


def test_a_load_nobody_waits_for_leaves_the_device_to_others(stored: StoredModels) -> None:
    """The request is taken back while its model waits for room."""
    config = stored.config("one", "two", max_model_wait_s=1e9, max_model_drain_s=1e9)
    with Driver(config) as driver:
        driver.submit(stored.generate(0, "one", [1, 2, 3], 400))
        driver.await_first(0)
        driver.submit(stored.generate(1, "two", [1, 2, 3], 400))
        driver.loop.post(0, Abort(1))
        driver.run(stored.generate(2, "one", [1, 2, 3], 4))
        assert tiers(driver)["one"] == "device"


def test_an_idle_model_leaves_for_an_adapter(stored: StoredModels) -> None:
    """Which fits beside one model, and not beside two."""
    shape, folder = stored.shapes["one"], stored.folder / "large"
    write_adapter(shape, folder, rank=128, seed=1)
    large = store_adapter(stored.store, folder, shape)
    with Driver(stored.config("one", "two", room=2)) as driver:
        for number, name in enumerate(("one", "two")):
            driver.submit(stored.generate(number, name, [1, 2, 3], 2))
        driver.wait()
        assert set(tiers(driver).values()) == {"device"}
        driver.run(stored.generate(2, "one", [1, 2, 3], 2, large))
        assert driver.ended[2] is FinishReason.LENGTH


@pytest.mark.parametrize("form", FORMS)
def test_a_load_that_fails_half_way_keeps_nothing(
    stored: StoredModels, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Nor until garbage is collected some day: the next try will want the memory that it lacked."""

    def num_bytes() -> int:
        tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
        return sum({t.untyped_storage().data_ptr(): t.nbytes for t in tensors}.values())

    with Driver(stored.config("one", "two", **FORMS[form])) as driver:
        driver.run(stored.generate(0, "one", [1, 2, 3], 4))
        pack, left = driver.worker.ops.pack_linear, iter(range(5))

        def pack_some(*weights: Weight, bias: torch.Tensor | None = None) -> PackedLinear:
            if next(left, None) is None:
                raise MemoryError
            return pack(*weights, bias=bias)

        monkeypatch.setattr(driver.worker.ops, "pack_linear", pack_some)
        one = models(driver.await_status(lambda s: True))["one"]
        gc.collect()
        before = num_bytes() - (0 if "keeps_weights" in FORMS[form] else one.num_bytes)
        gc.disable()
        try:
            driver.run(stored.generate(1, "two", [1, 2, 3], 4))
            assert driver.ended[1] is ErrorCode.MODEL_UNAVAILABLE
            assert next(left, None) is None
            print(num_bytes() - before)
            assert num_bytes() <= before
        finally:
            gc.enable()


def test_a_broken_model_fails_by_name_and_harms_nobody_else(
    stored: StoredModels, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(stored.folder / "store", store)
    weights = store / "models" / stored.digests["two"] / "model.safetensors"
    whole = weights.read_bytes()
    weights.chmod(0o644)
    weights.write_bytes(whole[: len(whole) // 2])
    config = stored.config("one", "two", store=str(store))
    with Driver(config) as driver:
        driver.submit(stored.generate(0, "one", [1, 2, 3], 300))
        driver.submit(stored.generate(1, "two", [1, 2, 3], 4))
        driver.wait()
        assert driver.ended == {0: FinishReason.LENGTH, 1: ErrorCode.MODEL_UNAVAILABLE}
        status = driver.await_status(lambda s: models(s)["two"].error != "")
        assert models(status)["two"].tier == "host"
        driver.run(stored.generate(2, "two", [1, 2, 3], 4), stored.generate(3, "one", [1, 2, 3], 4))
        assert driver.ended[2] is ErrorCode.MODEL_UNAVAILABLE
        assert driver.ended[3] is FinishReason.LENGTH
        weights.write_bytes(whole)
        number = 4
        while driver.ended[number - 1] is not FinishReason.LENGTH or number == 4:
            sleep(0.1)
            driver.run(stored.generate(number, "two", [1, 2, 3], 4))
            number += 1
        status = driver.await_status(lambda s: models(s)["two"].tier == "device")
        assert models(status)["two"].error == ""


def test_a_probe_waits_for_its_model(stored: StoredModels) -> None:
    """And proves there what it proves anywhere."""
    with Driver(stored.config("one", "three")) as driver:
        result = driver.probe(1, stored.digests["three"], stored.refs["three"][0])
        assert result.error == "" and result.fingerprint is not None
        result = driver.probe(2, stored.digests["one"], stored.refs["one"][0])
        assert result.error == ""


def test_the_catalog_registers_pins_and_unloads(stored: StoredModels) -> None:
    one, three = (DesiredModel(stored.digests[name], name) for name in ("one", "three"))
    missing = DesiredModel("0" * 64, "missing")
    with Driver(stored.config("one", room=1)) as driver:
        driver.run(stored.generate(0, "three", [1, 2, 3], 4))
        assert driver.ended[0] is ErrorCode.MODEL_UNKNOWN
        driver.loop.post(1, Desired(1, [], [one, three, missing]))
        status = driver.await_status(
            lambda s: (
                models(s).keys() == {"one", "three", "missing"}
                and models(s)["missing"].error != ""
                and models(s)["three"].tier != "cold"
            )
        )
        assert models(status)["missing"].tier == "cold"
        assert driver.loop.is_ready, "what cannot come keeps it from nothing"
        assert [model.name for model in driver.models] == ["one", "three"]
        driver.run(stored.generate(1, "three", [1, 2, 3], 4))
        assert driver.ended[1] is FinishReason.LENGTH

        pinned = DesiredModel(one.digest, "one", is_pinned=True)
        driver.loop.post(1, Desired(2, [], [pinned, three]))
        driver.await_status(lambda s: s.generation == 2 and models(s)["one"].tier == "device")
        driver.run(stored.generate(2, "three", [1, 2, 3], 4))
        assert driver.ended[2] is ErrorCode.OVERLOADED, "it cannot fit beside the pinned one"

        unloaded = DesiredModel(one.digest, "one", is_unloaded=True)
        driver.loop.post(1, Desired(3, [], [unloaded, three]))
        driver.await_status(lambda s: models(s)["one"].tier == "host")
        driver.submit(stored.generate(3, "one", [1, 2, 3], 4))
        driver.submit(stored.generate(4, "three", [1, 2, 3], 4))
        driver.wait()
        assert driver.ended[3] is ErrorCode.MODEL_UNAVAILABLE
        assert driver.ended[4] is FinishReason.LENGTH
        probed = driver.probe(5, one.digest, stored.refs["one"][0])
        assert (probed.error, probed.is_final) == ("adapter.probe.model_unavailable", False)
        assert probed.message == "the base model is unloaded"


@pytest.mark.parametrize("form", ["in-turn", "as-on-a-gpu"])
def test_a_model_registered_later_lies_beside_the_memory(stored: StoredModels, form: str) -> None:
    """`memory` is less than its weights, and KV keeps all of it."""
    settings: dict[str, Any] = {"device_memory": None, "memory": KV_EXTENTS * UNIT_BYTES}
    one, two, three = (DesiredModel(stored.digests[name], name) for name in FAMILIES)
    with Driver(stored.config("three", **settings, **FORMS[form])) as driver:
        before = driver.await_status(lambda _: True)
        driver.loop.post(1, Desired(1, [], [three, one]))
        driver.await_status(lambda s: "one" in models(s) and models(s)["one"].tier == "host")
        for number, name in enumerate(["one", "three", "one"]):
            driver.submit(stored.generate(number, name, [1, 2, 3], 4))
        driver.wait()
        assert set(driver.ended.values()) == {FinishReason.LENGTH}
        after = driver.await_status(lambda s: models(s)["one"].tier == "device")
        assert [model.num_swaps for model in models(after).values()] == [1, 1], "both stay"
        assert models(after)["three"].pages_total == models(before)["three"].pages_total
        grown = after.arena_bytes - before.arena_bytes
        assert grown >= stored.plans["one"].max_bytes(select("cpu"))
        assert len(after.extents) * driver.worker.memory.arena.extent_bytes == after.arena_bytes

        # One that the catalog has no more leaves its room to the next.
        driver.loop.post(1, Desired(2, [], [three, two]))
        driver.await_status(lambda s: "two" in models(s) and models(s)["two"].tier == "host")
        driver.run(stored.generate(3, "two", [1, 2, 3], 4))
        assert driver.ended[3] is FinishReason.LENGTH
        last = driver.await_status(lambda s: models(s)["two"].tier == "device")
        assert last.arena_bytes - after.arena_bytes <= UNIT_BYTES
        assert models(last).keys() == {"two", "three"}
        assert models(last)["three"].tier == "device"
        driver.worker.memory.arena.check_integrity()


def freed_event(part: object) -> threading.Event:
    """Is set when the part is freed."""
    event = threading.Event()
    weakref.finalize(part, event.set)
    return event


def buffers_of(model: ServedModel) -> ModelBuffers:
    runner = model.engine.runner
    assert isinstance(runner, ModelRunner)
    return runner._buffers


def adapter_threads() -> set[threading.Thread]:
    """Each model has two, from the first adapter on."""
    names = ("adapter-fetcher", "adapter-copier")
    return {thread for thread in threading.enumerate() if thread.name.startswith(names)}


@pytest.mark.parametrize("form", ["in-turn", "as-on-a-gpu"])
def test_a_model_that_the_catalog_drops_frees_all_that_it_had(
    stored: StoredModels, form: str, without_collector: None
) -> None:
    """Once its last sequence has ended, and without the collector of cycles."""
    one, two = (DesiredModel(stored.digests[name], name) for name in ("one", "two"))
    # Those of a worker that has just been closed may still be ending.
    others = adapter_threads()
    with Driver(stored.config("two", room=2, **FORMS[form])) as driver:
        driver.loop.post(1, Desired(1, [], [one, two]))
        driver.await_status(lambda s: "one" in models(s) and models(s)["one"].tier == "host")
        driver.submit(stored.generate(0, "one", [1, 2, 3] * 20, 100, stored.refs["one"][0]))
        driver.await_first(0)
        assert len(adapter_threads() - others) == 2
        worker = driver.worker
        buffers = buffers_of(worker.instances[one.digest])
        parts = [
            worker.instances[one.digest].engine.runner,
            buffers.tokens.untyped_storage(),
            buffers.tables.rank.untyped_storage(),
        ]
        freed = [freed_event(part) for part in parts]
        del parts, buffers
        driver.loop.post(1, Desired(2, [], [two]))
        driver.wait()
        assert driver.ended == {0: FinishReason.LENGTH}, "it runs to its end"
        driver.await_status(lambda s: models(s).keys() == {"two"})
        for event in freed:
            assert event.wait(60)
        assert [model.name for model in driver.models] == ["two"]
        assert not any(each.added for each in driver.prefixes.whole())
        assert not {"k", "a"} & {*worker.memory.arena.map()}
        assert len(worker.memory.broker._caches) == len(worker.memory.broker.holders) == 1
        while adapter_threads() - others:
            sleep(0.01)
        driver.run(stored.generate(1, "one", [1, 2, 3], 4))
        assert driver.ended[1] is ErrorCode.MODEL_UNKNOWN
        driver.loop.post(1, Desired(3, [], [one, two]))
        driver.await_status(lambda s: "one" in models(s) and models(s)["one"].tier == "host")
        driver.run(stored.generate(2, "one", [1, 2, 3] * 20, 100, stored.refs["one"][0]))
        assert driver.answers[2] == driver.answers[0]


def test_a_model_that_cannot_be_built_fails_by_name_and_ends_nothing_else(
    stored: StoredModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late in its building, in three ways; the next try finds everything as before."""
    one, two = (DesiredModel(stored.digests[name], name) for name in ("one", "two"))
    errors = [OSError(12, "no addresses"), MemoryError(), ValueError("no")]
    told: list[str] = []
    with Driver(stored.config("two", room=2)) as driver:
        worker = driver.worker
        reserve = worker.memory.device.reserve

        def fail_at_first(num_extents: int) -> AddressRange | None:
            assert worker.memory.arena.num_caches > 1, "it was half built"
            if errors:
                raise errors.pop(0)
            return reserve(num_extents)

        monkeypatch.setattr(fetcher, "RETRY_S", 0.0)
        monkeypatch.setattr(worker.memory.device, "reserve", fail_at_first)
        monkeypatch.setattr(fetcher.log, "warning", lambda _, *words: told.append(words[-1]))
        driver.submit(stored.generate(0, "two", [1, 2, 3], 300))
        driver.loop.post(1, Desired(1, [], [one, two]))
        driver.await_status(lambda s: "one" in models(s) and models(s)["one"].tier == "host")
        assert told == ["[Errno 12] no addresses", "MemoryError", "no"] and not errors
        assert len(worker.memory.broker._caches) == len(worker.memory.broker.holders) == 2
        driver.run(stored.generate(1, "one", [1, 2, 3], 4))
        assert set(driver.ended.values()) == {FinishReason.LENGTH}


def test_the_end_of_a_load_wakes_the_loop(
    stored: StoredModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a fetch, of weights, of an adapter and of a grammar: no timer ever ends its wait."""
    monkeypatch.setattr(loop, "TIMER_S", 3600.0)
    monkeypatch.setattr(loop, "STATUS_PERIOD_S", 3600.0)
    with Driver(stored.config("two", room=2)) as driver:
        driver.await_status(lambda _: True)
        models = [DesiredModel(stored.digests[name], name) for name in ("one", "two")]
        driver.loop.post(1, Desired(1, [], models))
        driver.await_models("one", "two")
        request = stored.generate(0, "one", [1, 2, 3], 4, stored.refs["one"][0])
        grammar = grammars.of_regex("(ab|[0-9]{2}){1,4}-[x-z]{3}")
        driver.run(msgspec.structs.replace(request, grammar=grammar))
    assert driver.ended[0] in list(FinishReason)


def test_a_model_that_can_never_be_served_says_so(stored: StoredModels) -> None:
    """A worker cuts its memory before it knows of the model."""
    one = DesiredModel(stored.digests["one"], "one")
    with Driver(stored.config(device_memory=8 << 20)) as driver:
        driver.loop.post(1, Desired(1, [], [one]))
        status = driver.await_status(lambda s: "one" in models(s) and models(s)["one"].error != "")
        assert "needs 16.00 MiB" in (why_unsatisfiable(status.models) or "")
        driver.loop.post(1, Desired(2, [], []))
        later = driver.await_status(lambda s: not s.models)
        assert why_unsatisfiable(later.models) is None, "it is ready again"
    found = models(status)["one"]
    assert found.tier == "unsatisfiable"
    assert found.error == "needs 16.00 MiB, the worker's device_memory is 8.00 MiB"


@pytest.mark.parametrize(
    "sizes",
    [
        {"device_memory": 8 * UNIT_BYTES},
        {"memory": 1},
        {"memory": UNIT_BYTES, "adapter_memory_min": 3 * UNIT_BYTES + 1},
        {"device_memory": 1, "adapter_memory_min": 5 * UNIT_BYTES},
    ],
)
def test_too_little_memory_is_refused_at_the_start_with_the_least_that_does(
    stored: StoredModels, sizes: dict[str, int]
) -> None:
    name, given = next(iter(sizes.items()))

    def build(num_bytes: int) -> None:
        settings: dict[str, Any] = {"device_memory": None} | sizes | {name: num_bytes}
        with Driver(stored.config("one", "three", **settings)):
            pass

    with pytest.raises(CannotServe, match=f"^{name}: {given} bytes are too few") as refused:
        build(given)
    least = int(str(refused.value).rpartition(" ")[2])
    build(least)
    with pytest.raises(CannotServe, match=f"the least is {least}$"):
        build(least - 1)


def test_buffers_and_tables_outside_the_arena_are_part_of_the_device_memory(
    stored: StoredModels,
) -> None:
    """As on a GPU, where they take of the same memory; what is planned is what is allocated."""
    total = 64 << 20
    settings: dict[str, Any] = {"keeps_weights": True, "device_memory": total, "max_num_seqs": 40}
    with Driver(stored.config("one", "two", **settings)) as driver:
        allocated = 0
        for name in ("one", "two"):
            model = driver.worker.instances[stored.digests[name]]
            buffers = buffers_of(model)
            tables = buffers.tables
            for tensor in (buffers.tokens, tables.a_offset, tables.b_offset, tables.rank):
                allocated += tensor.nbytes
        arena = driver.worker.memory.arena
        assert allocated > arena.extent_bytes
        assert (
            arena.num_bytes + allocated <= total < arena.num_bytes + allocated + arena.extent_bytes
        )


@pytest.mark.parametrize("name", ["memory", "device_memory"])
@pytest.mark.parametrize("num_bytes", [1 << 58, 1 << 70])
def test_more_memory_than_can_be_is_refused(
    stored: StoredModels, name: str, num_bytes: int
) -> None:
    sizes: dict[str, Any] = {"device_memory": None, name: num_bytes}
    with pytest.raises(CannotServe, match=f"^{name}: this machine gives no {num_bytes} bytes"):
        Driver(stored.config(**sizes))


@pytest.mark.parametrize("name", ["max_num_seqs", "max_loaded_adapters"])
@pytest.mark.parametrize("value", [1 << 45, 1 << 60])
def test_more_rows_than_there_can_be_are_refused(
    stored: StoredModels, name: str, value: int
) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(CannotServe, match=rf"^{name}: this machine has no memory for {value}$"):
        Driver(stored.config("one", **settings))


def test_adapters_that_may_have_no_whole_extent_are_refused(stored: StoredModels) -> None:
    with pytest.raises(CannotServe, match="adapter_memory: adapters need 1 bytes"):
        Driver(stored.config("one", adapter_memory_min=1, adapter_memory_max=1))


def test_adapters_on_the_host_have_one_bound_for_all_models(stored: StoredModels) -> None:
    def held(host_bytes: int) -> list[int]:
        config = stored.config(*FAMILIES, host_adapter_memory=host_bytes)
        with Driver(config) as driver:
            pools = [driver.worker.instances[stored.digests[name]].pool for name in FAMILIES]
            # Not as messages: their loads begin on a thread for which a test cannot wait.
            for name, pool in zip(FAMILIES, pools, strict=True):
                with driver.worker.memory.broker.lock:
                    pool.prefetch(stored.refs[name][0])
            while any(pool.loads.num_open for pool in pools):
                sleep(0.001)
            return [
                one.num_bytes
                for pool in pools
                for one in pool.entries.values()
                if one.tier == "host"
            ]

    sizes = held(1 << 30)
    assert len(sizes) == len(FAMILIES)
    assert 0 < sum(held(max(sizes))) <= max(sizes)
