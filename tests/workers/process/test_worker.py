"""The whole worker but its server, on tiny models: many adapters at once against transformers +
peft alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from adapters.manifest import BaseModelShape
from adapters.reference import AdapterRef
from adapters.store.folder import LocalStore
from loraplex.settings import load_settings
from tests.doubles import make_adapter, make_model
from tests.oracle import Oracle, Verdict
from tests.workers.driver import Driver, store_adapter
from tests.workers.formed_worker import FormedConfig
from workers.importer import import_model
from workers.process.build import Worker
from workers.process.config import WorkerConfig
from workers.wire.protocol import ErrorCode, FinishReason, Generate, OutputKind, SamplingParams

ADAPTERS: dict[str, dict[str, Any]] = {
    "r4": {"rank": 4},
    "r8-rslora": {"rank": 8, "use_rslora": True},
    "r5-attention": {"rank": 5, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "r12-mlp": {"rank": 12, "targets": ["gate_proj", "up_proj", "down_proj"]},
    "r16-patterns": {
        "rank": 16,
        "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 20},
        "alpha_pattern": {"v_proj": 40},
    },
    "r1-one-layer": {"rank": 1, "targets": ["q_proj", "up_proj"], "layers_to_transform": [1]},
}


class Setup:
    def __init__(
        self, folder: Path, family: str, adapters: dict[str, dict[str, Any]] = ADAPTERS
    ) -> None:
        self.folder = folder
        source = make_model(folder / "source", family)
        self.digest = import_model(source, LocalStore(folder / "store"))
        store = LocalStore(folder / "store")
        self.model = store.model_folder(self.digest)
        config = json.loads((self.model / "config.json").read_text())
        shape = BaseModelShape.from_config(config, self.digest)
        self.folders = {
            name: make_adapter(source, folder / name, seed=seed, b_std=0.5, **options)
            for seed, (name, options) in enumerate(adapters.items())
        }
        self.refs = {name: store_adapter(store, path, shape) for name, path in self.folders.items()}

    def config(self, **changes: object) -> WorkerConfig:
        settings = {
            "models": {"tiny": self.digest},
            "store": str(self.folder / "store"),
            "cache_dir": self.folder / "cache",
            "listen": "",
            "dtype": "float32",
            "threads": 1,
            "memory": 4 << 20,
            "max_num_seqs": 16,
            "max_batched_tokens": 64,
            **changes,
        }
        return FormedConfig(**settings)  # pyright: ignore

    def generate(
        self, number: int, prompt: list[int], max_tokens: int, adapter: AdapterRef | None
    ) -> Generate:
        params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        return Generate(
            number, str(number), self.digest, prompt, params, cache_domain="t", adapter=adapter
        )


STARCODER_ADAPTERS: dict[str, dict[str, Any]] = {
    "r4": {"rank": 4},
    "r8-rslora": {"rank": 8, "use_rslora": True},
    "r5-attention": {"rank": 5, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "r12-mlp": {"rank": 12, "targets": ["c_fc", "c_proj"]},
    "r1-one-layer": {"rank": 1, "targets": ["q_proj", "c_fc"], "layers_to_transform": [1]},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    yield Setup(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize(
    ("backend", "runs_ahead"),
    [("reference", False), ("cpu", False), ("cpu", True)],
    ids=["reference", "cpu", "cpu-ahead"],
)
def test_batched_with_strangers_equals_alone_equals_peft(
    llama: Setup, backend: str, runs_ahead: bool
) -> None:
    """Little memory: sequences are preempted and adapters evicted, and nothing changes."""
    config = llama.config(
        ops=backend, memory=(12 << 16), max_loaded_adapters=3, runs_ahead=runs_ahead
    )
    assert_batched_equals_alone(llama, config)


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "runs_ahead"), [("reference", False), ("cpu", True)], ids=["reference", "cpu-ahead"]
)
def test_the_same_of_a_family_that_transformers_computes(
    tmp_path: Path, backend: str, runs_ahead: bool
) -> None:
    """In addition, every adapter is proved as an upload is."""
    starcoder = Setup(tmp_path, "starcoder2", STARCODER_ADAPTERS)
    config = starcoder.config(
        ops=backend, memory=(12 << 16), max_loaded_adapters=3, runs_ahead=runs_ahead
    )
    assert_batched_equals_alone(starcoder, config)
    with Driver(config) as driver:
        for number, (name, ref) in enumerate(starcoder.refs.items()):
            assert (name, driver.probe(number, starcoder.digest, ref).error) == (name, "")


def assert_batched_equals_alone(setup: Setup, config: WorkerConfig) -> None:
    rng = random.Random(7)
    shared = [rng.randrange(256) for _ in range(48)]
    with Driver(config) as driver:
        requests: list[tuple[Generate, str | None]] = []
        for number in range(40):
            name = rng.choice([None, *setup.refs])
            own = [rng.randrange(256) for _ in range(rng.randrange(1, 30))]
            prompt = (shared if rng.random() < 0.5 else []) + own
            ref = None if name is None else setup.refs[name]
            requests.append((setup.generate(number, prompt, 64, ref), name))
        for request, _ in requests:
            driver.submit(request)
        driver.wait()
        scheduler = driver.worker.instances[setup.digest].engine.scheduler
        assert scheduler.num_preemptions > 0
        assert scheduler.num_hit_tokens > 0
    oracle = Oracle(setup.model, setup.folders)
    verdict = Verdict()
    for request, name in requests:
        assert driver.ended[request.id] is FinishReason.LENGTH
        answer = driver.answers[request.id]
        oracle.judge(verdict, request.tokens, answer, name, f"{request.id} {name}")
    verdict.assert_equal()


@pytest.mark.parametrize("head_dim", [100, 288])
def test_a_head_size_that_the_backend_does_not_compute_is_refused(
    tmp_path: Path, head_dim: int
) -> None:
    """100: OpenLLaMA 3B."""
    source = make_model(tmp_path / "source", head_dim=head_dim)
    digest = import_model(source, LocalStore(tmp_path / "store"))
    config = WorkerConfig(
        models={"tiny": digest},
        store=str(tmp_path / "store"),
        cache_dir=tmp_path / "cache",
        listen="",
        memory=16 << 20,
    )
    with pytest.raises(ValueError, match=f"model tiny: head_dim is {head_dim}"):
        Worker(config, instance_id="w", progress=lambda *_: None)


def test_the_shortest_max_model_len_is_enough_to_warm_up(llama: Setup) -> None:
    config = llama.config(max_model_len=load_settings({"max_model_len": 5}, {}).max_model_len)
    Worker(config, instance_id="w", progress=lambda *_: None)


def test_adapters_make_a_difference(llama: Setup) -> None:
    """Or else the parity above would hold for a worker that ignores them."""
    prompt = list(range(40))
    params = SamplingParams(max_tokens=0, seed=0, prompt_logprobs=0)
    with Driver(llama.config()) as driver:
        for number, ref in enumerate([None, *llama.refs.values()]):
            driver.submit(
                Generate(
                    *(number, "", llama.digest, prompt, params),
                    cache_domain="t",
                    adapter=ref,
                    kind=OutputKind.SCORE,
                )
            )
        driver.wait()
    scores = [
        [entry.logprob for entry in outputs[-1].prompt_logprobs or []]
        for outputs in driver.outputs.values()
    ]
    for one, other in combinations(scores, 2):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.05


def test_an_unknown_adapter_fails_by_name_and_alone(llama: Setup) -> None:
    with Driver(llama.config()) as driver:
        driver.submit(llama.generate(0, [1, 2, 3], 4, AdapterRef("0" * 64)))
        driver.submit(llama.generate(1, [1, 2, 3], 4, None))
        driver.wait()
    assert driver.ended == {
        0: ErrorCode.ADAPTER_UNAVAILABLE,
        1: FinishReason.LENGTH,
    }


def import_broken_model(folder: Path, table: str) -> str:
    """Digest of a model with NaN for token 7 in one of its two tables, in the folder's store."""
    source = make_model(folder / "source", "llama", tie_word_embeddings=False)
    weights = load_file(source / "model.safetensors")
    weights[table][7] = float("nan")
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    return import_model(source, LocalStore(folder / "store"))


@pytest.mark.parametrize(
    ("backend", "runs_ahead"),
    [("reference", False), ("cpu", False), ("cpu", True)],
    ids=["reference", "cpu", "cpu-ahead"],
)
def test_what_makes_no_numbers_fails_alone(tmp_path: Path, backend: str, runs_ahead: bool) -> None:
    """A model that is broken for one token."""
    digest = import_broken_model(tmp_path, "model.embed_tokens.weight")
    config = FormedConfig(
        models={"tiny": digest},
        store=str(tmp_path / "store"),
        cache_dir=tmp_path / "cache",
        listen="",
        ops=backend,
        runs_ahead=runs_ahead,
        memory=16 << 20,
    )
    prompts = [[1, 2, 7], [7], [1, 2, 3], [1, 2, 3]]
    never = {7: -100.0}
    with Driver(config) as driver:
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                8, 0, temperature=number % 2, logprobs=2, logit_bias=never, ignore_eos=True
            )
            driver.submit(Generate(number, "", digest, prompt, params, cache_domain=""))
        driver.wait()
    failed, whole = ErrorCode.LOGITS_NAN, FinishReason.LENGTH
    assert driver.ended == {0: failed, 1: failed, 2: whole, 3: whole}
    assert [len(driver.answers[number]) for number in range(4)] == [0, 0, 8, 8]


def test_prompt_logprobs_equal_the_oracle(llama: Setup) -> None:
    prompt = [5, 9, 200, 31, 77, 8, 120] * 12
    params = SamplingParams(max_tokens=0, seed=0, prompt_logprobs=3)
    ref = llama.refs["r4"]
    with Driver(llama.config()) as driver:
        for number in range(2):
            driver.submit(
                Generate(
                    *(number, "", llama.digest, prompt, params),
                    cache_domain="t",
                    adapter=ref,
                    kind=OutputKind.SCORE,
                )
            )
        driver.wait()
    expected = Oracle(llama.model, llama.folders).logits(prompt, "r4").log_softmax(-1)
    for number in range(2):
        scored = driver.outputs[number][-1].prompt_logprobs
        assert scored is not None
        assert [entry.token for entry in scored] == prompt[1:]
        for position, entry in enumerate(scored):
            row = expected[position]
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-3)
            assert entry.top[0][1] == pytest.approx(float(row.max()), abs=1e-3)
            assert len(entry.top) == 3


def test_sampling_depends_on_seed_position_and_choice_only(llama: Setup) -> None:
    prompt = [3, 1, 4, 1, 5]

    def params(seed: int, choice: int = 0) -> SamplingParams:
        return SamplingParams(12, seed, choice, temperature=8.0, ignore_eos=True)

    def sample(seed: int, choice: int, strangers: int) -> list[int]:
        with Driver(llama.config()) as driver:
            request = Generate(0, "", llama.digest, prompt, params(seed, choice), cache_domain="t")
            for number in range(strangers):
                driver.submit(llama.generate(number + 1, [number], 8, None))
            driver.run(request)
        return driver.answers[0]

    alone = sample(11, 0, strangers=0)
    assert sample(11, 0, strangers=7) == alone
    assert sample(12, 0, strangers=0) != alone
    assert sample(11, 1, strangers=0) != alone


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_temperature_of_almost_nothing_draws_what_none_does(llama: Setup, backend: str) -> None:
    """Logits divided by it do not overflow."""
    with Driver(llama.config(ops=backend)) as driver:
        for number, temperature in enumerate((0.0, 1e-38, 1e-30)):
            params = SamplingParams(max_tokens=8, seed=1, temperature=temperature, ignore_eos=True)
            driver.submit(Generate(number, "", llama.digest, [1, 2, 3], params, cache_domain="t"))
        driver.wait()
    assert driver.answers[0] == driver.answers[1] == driver.answers[2]
