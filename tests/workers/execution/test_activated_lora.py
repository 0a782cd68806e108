"""Activated LoRA through the whole worker against peft's: where it acts, and what it shares."""

from __future__ import annotations

import random

import pytest
import torch

from gateway.dispatch.prompts import find_activation
from memory.page_key import PAGE_TOKENS
from tests.doubles import SIZES
from tests.oracle import Oracle, Verdict
from tests.workers.driver import Driver
from tests.workers.process.test_worker import Setup
from workers.wire.protocol import FinishReason, Generate, OutputKind, SamplingParams

INVOCATIONS = {
    "word": [300],
    "pair": [5, 5],
    "sentence": [41, 42, 41, 42, 41, 43, *range(100, 118)],
}
ADAPTERS = {
    name: {"rank": 4 + 4 * number, "alora_invocation_tokens": tokens}
    for number, (name, tokens) in enumerate(INVOCATIONS.items())
} | {"plain": {"rank": 4}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("llama"), "llama", ADAPTERS)


@pytest.fixture(scope="module")
def oracle(llama: Setup) -> Oracle:
    return Oracle(llama.model, llama.folders)


def ask(
    llama: Setup, number: int, prompt: list[int], name: str | None, params: SamplingParams
) -> Generate:
    """As the gateway asks."""
    activation = find_activation(prompt, INVOCATIONS.get(name or "", ()))
    is_base = name is None or activation is None
    return Generate(
        number,
        str(number),
        llama.digest,
        prompt,
        params,
        cache_domain="t",
        adapter=None if is_base else llama.refs[name],
        activation=0 if is_base else activation,
        kind=OutputKind.GENERATE if params.max_tokens else OutputKind.SCORE,
    )


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, 0, temperature=0.0, ignore_eos=True)


def text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(200, 256) for _ in range(length)]


def prompts(rng: random.Random) -> list[tuple[list[int], str | None]]:
    """Invocations at the start, at and about page borders, twice, absent, overlapping and cut."""
    shared = text(rng, 70)
    asked: list[tuple[list[int], str | None]] = []
    for name, invocation in INVOCATIONS.items():
        for start in (0, 1, 15, 16, 17, 31, 32, 47, 64):
            asked.append((shared[:start] + invocation + text(rng, rng.randrange(9)), name))
        twice = shared[:20] + invocation + shared[20:40] + invocation
        asked += [(twice, name), (twice + text(rng, 5), name)]
        asked += [(shared[:50], name), (shared[:40] + invocation[:-1], name)]
    pair, sentence = INVOCATIONS["pair"], INVOCATIONS["sentence"]
    asked += [(shared[:length] + pair + pair[:1], "pair") for length in (13, 14, 15, 30)]
    asked += [(shared[:30] + sentence[:5] + sentence + sentence[:9], "sentence")]
    asked += [(shared[:length], name) for length in (33, 60) for name in (None, "plain")]
    rng.shuffle(asked)
    return asked


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("max_batched_tokens", [19, pytest.param(64, marks=pytest.mark.full)])
def test_batched_with_strangers_equals_peft(
    llama: Setup, oracle: Oracle, backend: str, max_batched_tokens: int
) -> None:
    """In little memory: preempted, evicted and recomputed, in chunks that end anywhere."""
    asked = prompts(random.Random(3))
    config = llama.config(
        ops=backend,
        memory=(10 << 16),
        max_loaded_adapters=2,
        max_batched_tokens=max_batched_tokens,
    )
    with Driver(config) as driver:
        for number, (prompt, name) in enumerate(asked):
            driver.submit(ask(llama, number, prompt, name, greedy(64)))
        driver.wait()
        scheduler = driver.worker.instances[llama.digest].engine.scheduler
        assert scheduler.num_preemptions > 0
        assert scheduler.num_hit_tokens > 0
    verdict = Verdict()
    for number, (prompt, name) in enumerate(asked):
        assert driver.ended[number] is FinishReason.LENGTH
        oracle.judge(verdict, prompt, driver.answers[number], name, f"{number} {name}")
    verdict.assert_equal()


def test_the_oracle_is_what_peft_generates(oracle: Oracle) -> None:
    """Its KV cache and its own search for the invocation; or else we agree with ourselves only."""
    rng = random.Random(4)
    asked = [one for one in prompts(rng) if one[1] in INVOCATIONS][:12]
    for prompt, name in asked:
        assert name is not None
        forced = oracle.generate(prompt, name, 12)
        logits = oracle.logits(forced[:-1], name, last=12, num_prompt=len(prompt)).clone()
        logits[:, [SIZES["eos_token_id"], *oracle.unnamed_ids]] = -torch.inf
        assert logits.argmax(-1).tolist() == forced[len(prompt) :]


def test_where_it_acts_makes_a_difference(oracle: Oracle) -> None:
    prompt = text(random.Random(5), 40) + INVOCATIONS["word"] + [201, 202]
    activated = oracle.logits(prompt, "word")
    base = oracle.logits(prompt, None)
    assert float((activated[:40] - base[:40]).abs().max()) == 0
    assert float((activated[40:] - base[40:]).abs().amin(0).max()) > 0.05
    assert float((activated - oracle.logits(prompt, "plain"))[:40].abs().max()) > 0.05


@pytest.mark.parametrize("max_batched_tokens", [5, 64])
def test_prompt_logprobs_equal_peft(llama: Setup, oracle: Oracle, max_batched_tokens: int) -> None:
    asked = [(prompt, name) for prompt, name in prompts(random.Random(6)) if len(prompt) > 1][:20]
    params = SamplingParams(max_tokens=0, seed=0, prompt_logprobs=0)
    with Driver(llama.config(max_batched_tokens=max_batched_tokens)) as driver:
        for number, (prompt, name) in enumerate(asked):
            driver.submit(ask(llama, number, prompt, name, params))
        driver.wait()
    for number, (prompt, name) in enumerate(asked):
        expected = oracle.logits(prompt, name).log_softmax(-1)
        scored = driver.outputs[number][-1].prompt_logprobs
        assert scored is not None
        assert [entry.token for entry in scored] == prompt[1:]
        for position, entry in enumerate(scored):
            assert entry.logprob == pytest.approx(float(expected[position, entry.token]), abs=1e-3)


def test_choices_of_one_prompt_share_it(llama: Setup, oracle: Oracle) -> None:
    prompt = text(random.Random(7), 60) + INVOCATIONS["word"] + text(random.Random(8), 20)
    with Driver(llama.config()) as driver:
        for number in range(4):
            driver.submit(ask(llama, number, prompt, "word", greedy(8)))
        driver.wait()
    assert sorted(driver.outputs[n][0].num_cached_tokens for n in range(4)) == [0, 80, 80, 80]
    verdict = Verdict()
    for number in range(4):
        oracle.judge(verdict, prompt, driver.answers[number], "word", str(number))
    verdict.assert_equal()


def test_the_prefix_before_is_shared_with_the_base_and_among_adapters(llama: Setup) -> None:
    prefix = text(random.Random(9), 5 * PAGE_TOKENS)
    asked = [
        ([*prefix, 1], None, 0),
        (prefix + INVOCATIONS["word"], "word", 80),
        (prefix + INVOCATIONS["sentence"], "sentence", 80),
        (prefix[:70] + INVOCATIONS["pair"] + [1] * 20, "pair", 64),
        (prefix[:70] + INVOCATIONS["pair"] + [1] * 20, "pair", 80),
        (prefix, "word", 64),
        ([*prefix, 2], "plain", 0),
    ]
    with Driver(llama.config()) as driver:
        for number, (prompt, name, num_cached) in enumerate(asked):
            driver.run(ask(llama, number, prompt, name, greedy(2)))
            assert driver.outputs[number][0].num_cached_tokens == num_cached, (number, name)
