"""The proof of an adapter's effect: right ones pass, whatever is wrong with the image is named, and
nobody beside it notices."""

from __future__ import annotations

import gc
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters.format.validator import AdapterFiles, content_digest
from adapters.manifest import PROJECTIONS, BaseModelShape
from adapters.pool.image import ImageCache
from adapters.pool.lora import ImageLayout, pack
from adapters.pool.packed_image import AdapterImage, ImageTables
from adapters.pool.source import AdapterLease, AdapterUnavailable
from adapters.reference import AdapterRef
from adapters.store.folder import LocalStore
from tests.adapters.files import listed
from tests.doubles import write_adapter
from tests.oracle import Oracle, Verdict
from tests.workers.base_models.test_swapping import StoredModels
from tests.workers.driver import Driver, store_adapter
from tests.workers.process.test_worker import ADAPTERS, Setup, import_broken_model
from workers.process.config import WorkerConfig
from workers.process.server import Disconnected
from workers.verification import effect_proof as proofs
from workers.verification.adapter_verifier import MAX_QUEUED
from workers.verification.effect_proof import NotProved
from workers.verification.scoring import score_tokens
from workers.wire.frames import Drain, Probe, Withdraw
from workers.wire.protocol import ErrorCode, FinishReason

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
ALL_ADAPTERS = ADAPTERS | {
    "activated": {"rank": 4, "alora_invocation_tokens": [300, 301]},
    "outer": {"rank": 4, "targets": ["q_proj", "embed_tokens", "lm_head"]},
    "tokens": {"rank": 4, "trainable_token_indices": [*range(40, 140)]},
    "saved": {"rank": 4, "modules_to_save": ["embed_tokens", "lm_head"]},
}
DOWN, GATE, UP = (PROJECTIONS.index(f"{name}_proj") for name in ("down", "gate", "up"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("llama"), "llama", ALL_ADAPTERS)


@pytest.fixture(scope="module")
def store(llama: Setup) -> LocalStore:
    return LocalStore(llama.folder / "store")


@pytest.fixture(scope="module")
def shape(llama: Setup) -> BaseModelShape:
    config = json.loads((llama.model / "config.json").read_text())
    return BaseModelShape.from_config(config, llama.digest)


def add(
    store: LocalStore, shape: BaseModelShape, folder: Path, *, seed: int = 0, b_std: float = 0.5
) -> AdapterRef:
    """An adapter of rank 8 on everything."""
    return store_adapter(store, write_adapter(shape, folder, rank=8, seed=seed, b_std=b_std), shape)


@BACKENDS
@DTYPES
def test_what_peft_saved_is_proved(
    llama: Setup, backend: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.verification.scoring.HEAD_ROWS", 100)
    with Driver(llama.config(ops=backend, dtype=dtype)) as driver:
        effect_proof = driver.worker.instances[llama.digest].effect_proof
        results = {
            name: driver.probe(number, llama.digest, ref)
            for number, (name, ref) in enumerate(llama.refs.items())
        }
    assert {name: result.error for name, result in results.items()} == dict.fromkeys(results, "")
    assert {result.layout for result in results.values()} == {effect_proof.layout.version}
    assert len({result.checksum for result in results.values()}) == len(results)
    if dtype == "bfloat16":
        return
    oracle = Oracle(llama.model, {name: llama.folders[name] for name in ADAPTERS})
    prompt = effect_proof.tokens
    for name in ADAPTERS:
        fingerprint = results[name].fingerprint
        assert fingerprint is not None
        with_adapter, without = (
            oracle.logits(prompt, adapter).log_softmax(-1) for adapter in (name, None)
        )
        best = with_adapter[-1].topk(len(fingerprint.tokens))
        assert fingerprint.tokens == best.indices.tolist()
        assert fingerprint.logprobs == pytest.approx(best.values.tolist(), abs=1e-3)
        change = (with_adapter - without)[range(len(prompt) - 1), prompt[1:]]
        assert fingerprint.effect == pytest.approx(float(change.abs().max()), abs=1e-3)


@pytest.mark.parametrize("ignored", ["decoder.replace_embeddings", "lm_head.replace_logits"])
def test_rows_that_are_not_replaced_are_noticed(
    llama: Setup, monkeypatch: pytest.MonkeyPatch, ignored: str
) -> None:
    """The image is right, and the engine does not compute with all of it."""
    with Driver(llama.config()) as driver:
        effect_proof = driver.worker.instances[llama.digest].effect_proof
        effect_proof.expect(llama.refs["saved"].digest)
        folder = "models" if ignored.startswith("decoder") else "layers"
        monkeypatch.setattr(f"workers.{folder}.{ignored}", lambda *_: None)
        refused = driver.probe(0, llama.digest, llama.refs["saved"])
    assert (refused.error, refused.is_final) == ("adapter.effect.logits", True)


def test_a_repeated_weight_must_be_the_base_models(llama: Setup, tmp_path: Path) -> None:
    """peft saves the weight of an adapted embedding or output matrix with the factors. A changed
    one would be computed with by peft, and not here."""
    shutil.copytree(llama.folders["outer"], tmp_path / "changed")
    weights = tmp_path / "changed" / "adapter_model.safetensors"
    tensors = load_file(weights)
    tensors["base_model.model.lm_head.base_layer.weight"][319, 63] += 1
    save_file(tensors, weights)
    config = json.loads((llama.model / "config.json").read_text())
    shape = BaseModelShape.from_config(config, llama.digest)
    ref = store_adapter(LocalStore(llama.folder / "store"), tmp_path / "changed", shape)
    with Driver(llama.config()) as driver:
        refused = driver.probe(0, llama.digest, ref)
    assert (refused.error, refused.is_final) == ("adapter.base.weights", True)
    assert "lm_head.base_layer.weight" in refused.message


def factor_b(
    tables: ImageTables, payload: Tensor, layout: ImageLayout, at: tuple[int, int]
) -> Tensor:
    """The bytes of B up to the next factor, as numbers."""
    start = int(tables.b_offset[at])
    later = [int(offset) for offset in tables.a_offset.flat if offset > start]
    return payload[start : min(later, default=len(payload))].view(layout.dtype)


def test_a_wrong_image_is_replaced(
    llama: Setup, store: LocalStore, shape: BaseModelShape, tmp_path: Path
) -> None:
    """The image is whole in itself, as a faulty build would leave it in the cache."""
    ref = add(store, shape, tmp_path / "adapter")
    with Driver(llama.config(cache_dir=tmp_path / "cache")) as driver:
        layout = driver.worker.instances[llama.digest].effect_proof.layout
        files = AdapterFiles.in_folder(store.adapter_folder(ref.digest))
        right = AdapterImage.of(ref.digest, *pack(files, shape, layout))
        tables, payload = pack(files, shape, layout)
        for offsets in (tables.a_offset, tables.b_offset):
            offsets[0, [GATE, UP]] = offsets[0, [UP, GATE]]
        wrong = AdapterImage.of(ref.digest, tables, payload)
        assert wrong.checksum != right.checksum
        ImageCache(tmp_path / "cache", 1 << 30).save(layout.version, wrong)
        refused = driver.probe(0, llama.digest, ref)
        assert (refused.error, refused.checksum) == ("adapter.image.mismatch", "")
        assert not refused.is_final, "the files are not at fault"
        proved = driver.probe(1, llama.digest, ref)
        assert (proved.error, proved.checksum) == ("", right.checksum)


@pytest.mark.parametrize("is_running", [False, True], ids=["idle", "running"])
def test_pages_of_a_wrong_image_are_not_reused_with_the_right_one(
    llama: Setup, store: LocalStore, shape: BaseModelShape, tmp_path: Path, is_running: bool
) -> None:
    """Neither those computed before the image was found wrong, nor those that a sequence that was
    running then computed after it."""
    ref = add(store, shape, tmp_path / "adapter", seed=22 + is_running)
    prompt, num_tokens = list(range(40, 90)), 300 if is_running else 40
    with Driver(llama.config(cache_dir=tmp_path / "cache")) as driver:
        instance = driver.worker.instances[llama.digest]
        layout = instance.effect_proof.layout
        files = AdapterFiles.in_folder(store.adapter_folder(ref.digest))
        checksum = AdapterImage.of(ref.digest, *pack(files, shape, layout)).checksum
        tables, payload = pack(files, shape, layout)
        tables.rank[:] = 0
        wrong = AdapterImage.of(ref.digest, tables, payload)
        ImageCache(tmp_path / "cache", 1 << 30).save(layout.version, wrong)
        driver.submit(llama.generate(0, prompt, num_tokens, ref))
        if is_running:
            driver.await_begun(0)
            with instance.engine.scheduler.kv.lock:
                assert instance.pool.entries[ref.digest].leases == 1
                instance.pool.prefetch(AdapterRef(ref.digest, checksum=checksum))
            driver.wait()
        else:
            driver.wait()
            assert driver.probe(0, llama.digest, ref).error == "adapter.image.mismatch"
        computed = prompt + driver.answers[0]
        for number, asked in enumerate((ref, AdapterRef(ref.digest, checksum=checksum)), 1):
            driver.submit(llama.generate(number, prompt, 40, asked))
            driver.submit(llama.generate(number + 2, computed, 8, asked))
        driver.wait()
        assert driver.probe(1, llama.digest, ref).checksum == checksum
        instance.engine.scheduler.kv.check_integrity(held=())
    oracle, verdict = Oracle(llama.model, {"adapter": tmp_path / "adapter"}), Verdict()
    for number, answer in driver.answers.items():
        if number > 0:
            asked = prompt if number <= 2 else computed
            oracle.judge(verdict, asked, answer, "adapter", f"answer {number}")
    verdict.assert_equal()
    assert driver.answers[0][:40] != driver.answers[1]


@pytest.mark.parametrize("factor", [0.0, 8**0.5, float("nan")], ids=["zero", "scale", "nan"])
def test_the_right_image_that_computes_something_else_is_refused_for_good(
    llama: Setup, store: LocalStore, shape: BaseModelShape, tmp_path: Path, factor: float
) -> None:
    ref = add(store, shape, tmp_path / "a", seed=20)
    with Driver(llama.config()) as driver:
        assert driver.probe(0, llama.digest, ref).error == ""
        layout = driver.worker.instances[llama.digest].effect_proof.layout
        tables, payload = pack(
            AdapterFiles.in_folder(store.adapter_folder(ref.digest)), shape, layout
        )
        arena = driver.worker.memory.device.tensor
        start = arena.numpy().tobytes().index(payload.numpy().tobytes())
        factor_b(tables, arena[start : start + len(payload)], layout, (1, DOWN)).mul_(factor)
        refused = driver.probe(1, llama.digest, ref)
    assert (refused.error, refused.is_final) == ("adapter.effect.logits", True)


def test_a_wrong_image_never_serves_a_reference_with_a_checksum(
    llama: Setup, store: LocalStore, shape: BaseModelShape, tmp_path: Path
) -> None:
    """Neither an answer of the wrong adapter nor of the base model."""
    ref = add(store, shape, tmp_path / "a", seed=21)
    prompt = list(range(40, 60))
    with Driver(llama.config(cache_dir=tmp_path / "one")) as driver:
        checksum = driver.probe(0, llama.digest, ref).checksum
        driver.submit(llama.generate(0, prompt, 8, AdapterRef(ref.digest, checksum=checksum)))
        driver.submit(llama.generate(1, prompt, 8, None))
        driver.wait()
        right, base = driver.answers[0], driver.answers[1]
        layout = driver.worker.instances[llama.digest].effect_proof.layout
    assert right != base
    tables, payload = pack(AdapterFiles.in_folder(store.adapter_folder(ref.digest)), shape, layout)
    tables.rank[:] = 0
    cache = ImageCache(tmp_path / "two", 1 << 30)
    cache.save(layout.version, AdapterImage.of(ref.digest, tables, payload))
    with Driver(llama.config(cache_dir=tmp_path / "two")) as driver:
        driver.submit(llama.generate(0, prompt, 8, AdapterRef(ref.digest, checksum=checksum)))
        driver.submit(llama.generate(1, prompt, 8, AdapterRef(ref.digest, checksum="0" * 64)))
        driver.wait()
    assert driver.answers[0] == right
    assert driver.ended[1] is ErrorCode.ADAPTER_UNAVAILABLE and driver.answers[1] == []


def test_no_effect_and_another_effect_are_told_apart(llama: Setup) -> None:
    """The comparison of log-probabilities alone: what the engine would say is made up here."""
    with Driver(llama.config()) as driver:
        effect_proof = driver.worker.instances[llama.digest].effect_proof
    expected, other = (effect_proof.expect(llama.refs[name].digest) for name in ("r4", "r12-mlp"))
    base = expected.base_scores
    assert effect_proof.check_scores(expected, expected.scores + 1e-5, base) > 1
    nan = torch.full_like(base, float("nan"))
    for scores, code in (
        (base, "adapter.effect.none"),
        (other.scores, "adapter.effect.logits"),
        (nan, "adapter.effect.logits"),
    ):
        with pytest.raises(NotProved) as caught:
            effect_proof.check_scores(expected, scores, base)
        assert caught.value.code == code and caught.value.is_final
    noop = replace(expected, is_zero=True, scores=base)
    assert effect_proof.check_scores(noop, base, base) == 0


def test_logits_that_are_no_numbers_prove_nothing(tmp_path: Path) -> None:
    """A model that is broken for one token of its vocabulary."""
    digest = import_broken_model(tmp_path, "lm_head.weight")
    store = LocalStore(tmp_path / "store")
    shape = BaseModelShape.from_config(
        json.loads((store.model_folder(digest) / "config.json").read_text()), digest
    )
    ref = add(store, shape, tmp_path / "adapter")
    config = WorkerConfig(
        models={"tiny": digest},
        store=str(tmp_path / "store"),
        cache_dir=tmp_path / "cache",
        listen="",
        memory=16 << 20,
    )
    with Driver(config) as driver:
        refused = driver.probe(0, digest, ref)
    assert (refused.error, refused.is_final) == ("adapter.effect.logits", True)
    assert "the probe prompt: logits_nan" in refused.message


def test_zero_factors_are_proved_and_factors_without_effect_are_not(
    llama: Setup, store: LocalStore, shape: BaseModelShape, tmp_path: Path
) -> None:
    zero = add(store, shape, tmp_path / "zero", b_std=0.0)
    tiny = add(store, shape, tmp_path / "tiny", b_std=1e-30)
    with Driver(llama.config()) as driver:
        proved = driver.probe(0, llama.digest, zero)
        refused = driver.probe(1, llama.digest, tiny)
    assert proved.error == "" and proved.fingerprint is not None
    assert proved.fingerprint.effect == 0
    assert (refused.error, refused.is_final) == ("adapter.effect.none", True)


def test_what_is_wrong_with_the_files_is_final_and_what_is_wrong_with_the_worker_is_not(
    llama: Setup, store: LocalStore, shape: BaseModelShape, tmp_path: Path
) -> None:
    staged = store.stage()
    wide = msgspec.structs.replace(shape, intermediate_size=2 * shape.intermediate_size)
    write_adapter(wide, staged, rank=4, seed=0)
    foreign = content_digest(listed(staged, wide))
    store.put("adapters", foreign, staged)
    damaged = add(store, shape, tmp_path / "damaged", seed=30)
    path = store.adapter_folder(damaged.digest) / "adapter_model.safetensors"
    path.chmod(0o600)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with Driver(llama.config(cache_dir=tmp_path / "cache")) as driver:

        def probe(number: int, digest: str) -> tuple[str, bool]:
            result = driver.probe(number, llama.digest, AdapterRef(digest))
            assert result.message
            return result.error, result.is_final

        assert probe(0, foreign) == ("adapter.base.mismatch", True)
        assert probe(1, damaged.digest) == ("adapter.store.corrupt", False)
        assert probe(2, "0" * 64) == ("adapter.store.missing", False)
        assert probe(3, "../etc") == ("adapter.store.missing", False)
        path.write_bytes(whole)
        assert driver.probe(4, llama.digest, damaged).error == ""
        assert driver.probe(5, "0" * 64, damaged).error == "adapter.probe.no_model"
        numbers = range(6, 6 + MAX_QUEUED + 20)
        # The loop handles none of them before all have come.
        with driver.worker.memory.broker.lock:
            for number in numbers:
                driver.loop.post(0, Probe(number, llama.digest, llama.refs["r4"]))
            driver.loop.post(0, Drain())
        answers = [driver.await_probe(number) for number in numbers]
        assert {answer.error for answer in answers[-10:]} == {"adapter.probe.busy"}
        assert answers[5].error == "adapter.probe.draining"
        assert not any(answer.is_final and answer.error for answer in answers)
        late = driver.probe(1000, llama.digest, damaged)
        assert (late.error, late.is_final) == ("adapter.probe.draining", False)


def test_an_adapter_too_large_for_this_worker_is_not_refused_for_good(
    llama: Setup, store: LocalStore, shape: BaseModelShape, tmp_path: Path
) -> None:
    folder = write_adapter(shape, tmp_path / "large", rank=64, seed=1)
    ref = store_adapter(store, folder, shape)
    with Driver(llama.config(adapter_memory_max=1 << 16, memory=8 << 20)) as driver:
        result = driver.probe(0, llama.digest, ref)
    assert (result.error, result.is_final) == ("adapter.too_large", False)


@pytest.mark.full
@BACKENDS
def test_streams_beside_probes_are_as_without_and_everything_is_given_back(
    llama: Setup, backend: str
) -> None:
    """Little memory and few slots: streams and probes preempt and evict each other."""
    rng = random.Random(3)
    names = list(ADAPTERS)
    requests = [
        llama.generate(
            number,
            [rng.randrange(256) for _ in range(rng.randrange(1, 40))],
            48,
            llama.refs[rng.choice(names)],
        )
        for number in range(24)
    ]
    config = llama.config(ops=backend, memory=12 << 16, max_loaded_adapters=3)

    def run(with_probes: bool) -> dict[int, list[int]]:
        with Driver(config) as driver:
            for request in requests:
                driver.submit(request)
            if with_probes:
                for number, ref in enumerate(llama.refs.values()):
                    driver.loop.post(0, Probe(number, llama.digest, ref))
                driver.loop.post(1, Probe(0, llama.digest, llama.refs["r4"]))
                driver.loop.post(1, Disconnected())
                for number in range(len(llama.refs)):
                    assert driver.await_probe(number).error == ""
            driver.wait()
            assert set(driver.ended.values()) == {FinishReason.LENGTH}
        instance = driver.worker.instances[llama.digest]
        instance.pool.check_integrity()
        assert not any(entry.leases for entry in instance.pool.entries.values())
        assert not instance.engine.has_work
        return driver.answers

    assert run(with_probes=True) == run(with_probes=False)


def test_a_gateway_that_leaves_takes_its_probes_along(llama: Setup) -> None:
    with Driver(llama.config()) as driver:
        for number in range(8):
            driver.loop.post(1, Probe(number, llama.digest, llama.refs["r4"]))
        driver.loop.post(1, Disconnected())
        assert driver.probe(100, llama.digest, llama.refs["r4"]).error == ""
        assert set(driver.probed) == {100}


def test_a_probe_that_is_withdrawn_is_dropped_and_what_was_computed_for_it_is_kept(
    llama: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []

    def count(*arguments: Any, **options: Any) -> Tensor:
        passes.append(len(arguments[-1]))
        return score_tokens(*arguments, **options)

    monkeypatch.setattr(proofs, "score_tokens", count)
    refs = list(llama.refs.values())
    with Driver(llama.config()) as driver:
        for number, ref in enumerate(refs):
            driver.loop.post(1, Probe(number, llama.digest, ref))
        for number in range(len(refs)):
            driver.loop.post(1, Withdraw(number))
        driver.loop.post(1, Withdraw(0))
        driver.loop.post(2, Probe(7, llama.digest, refs[0]))
        driver.loop.post(1, Withdraw(7))
        assert driver.await_probe(7).error == ""
        assert set(driver.probed) == {7}
        for number, ref in enumerate(refs, 100):
            assert driver.probe(number, llama.digest, ref).error == ""
        num_steps = driver.worker.instances[llama.digest].effect_proof.num_steps
        reported = driver.await_status(lambda status: status.models[0].num_proof_steps > 0)
        assert 0 < reported.models[0].num_proof_steps <= num_steps
    assert sum(passes) == len(refs)


def test_a_probe_that_failed_is_gone_with_its_answer(llama: Setup) -> None:
    """What it had read of the adapter too; not when garbage is collected some day."""
    with Driver(llama.config()) as driver:
        gc.collect()
        gc.disable()
        try:
            assert driver.probe(0, llama.digest, AdapterRef("0" * 64)).error
            assert not [one for one in gc.get_objects() if type(one) is AdapterUnavailable]
        finally:
            gc.enable()


def test_waiting_adapters_are_scored_in_one_pass(
    llama: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed for those that wait is kept, and is what each has alone."""
    passes: list[int] = []

    def count(*arguments: Any, **options: Any) -> Tensor:
        passes.append(len(arguments[-1]))
        return score_tokens(*arguments, **options)

    refs = list(llama.refs.values())
    with Driver(llama.config()) as driver:
        model = driver.worker.instances[llama.digest]
        alone = [model.effect_proof.expect(ref.digest).scores for ref in refs]
    monkeypatch.setattr(proofs, "score_tokens", count)
    with Driver(llama.config()) as driver:
        # The loop handles none of them before all have come.
        with driver.worker.memory.broker.lock:
            for number, ref in enumerate(refs):
                driver.loop.post(0, Probe(number, llama.digest, ref))
        assert [driver.await_probe(number).error for number in range(len(refs))] == [""] * len(refs)
        proof = driver.worker.instances[llama.digest].effect_proof
        together = [proof.expect(ref.digest).scores for ref in refs]
    # The first may have begun before the others were queued.
    assert len(passes) <= 2 and sum(passes) == len(refs)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_a_proof_without_room_delays_no_other_models(tmp_path: Path) -> None:
    stored = StoredModels(tmp_path, {"one": "llama", "two": "starcoder2"})
    one, two = stored.digests["one"], stored.digests["two"]
    with Driver(stored.config("one", "two", room=2, max_loaded_adapters=1)) as driver:
        loaded, waiting = stored.refs["one"]
        assert driver.probe(0, one, loaded).error == ""
        with driver.worker.memory.broker.lock:
            lease = driver.worker.instances[one].pool.acquire(loaded)
        assert isinstance(lease, AdapterLease)
        driver.loop.post(0, Probe(1, one, waiting))
        for number, ref in enumerate(stored.refs["two"], 2):
            assert driver.probe(number, two, ref).error == ""
        assert 1 not in driver.probed, "it waits"
        with driver.worker.memory.broker.lock:
            lease.release()
        assert driver.await_probe(1).error == ""


def test_proofs_of_several_models_share_one_pass_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets the log-probabilities of its own sequence, also if one is withdrawn."""
    passes, together = list[int](), list[int]()

    def count(*arguments: Any, **options: Any) -> Tensor:
        passes.append(1)
        together.append(len(passes))
        sleep(0.05)
        scores = score_tokens(*arguments, **options)
        passes.pop()
        return scores

    monkeypatch.setattr(proofs, "score_tokens", count)
    stored = StoredModels(tmp_path, {"one": "llama", "two": "starcoder2"})
    probes = [
        (name, ref)
        for pair in zip(*stored.refs.values(), strict=True)
        for name, ref in zip(stored.refs, pair, strict=True)
    ]
    with Driver(stored.config("one", "two", room=2)) as driver:
        with driver.worker.memory.broker.lock:
            for number, (name, ref) in enumerate(probes):
                driver.loop.post(0, Probe(number, stored.digests[name], ref))
            driver.loop.post(1, Probe(0, stored.digests["one"], stored.refs["one"][0]))
            driver.loop.post(1, Disconnected())
        assert [driver.await_probe(number).error for number in range(4)] == [""] * 4
        assert set(together) == {1}
        instances = driver.worker.instances.values()
        assert not any(instance.engine.has_work for instance in instances)


def test_the_next_one_s_files_do_not_matter_to_the_first(llama: Setup) -> None:
    with Driver(llama.config()) as driver:
        proof = driver.worker.instances[llama.digest].effect_proof
    digest = llama.refs["r4"].digest
    assert proof.expect(digest, ["0" * 64, "no digest"]).scores.isfinite().all()
    with pytest.raises(AdapterUnavailable):
        proof.expect("0" * 64)
