"""Activated LoRA as its users have it: uploaded as peft saved it, called over HTTP, equal to
peft."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import write_adapter
from tests.e2e.tiny import NAME, Tiny
from tests.oracle import Oracle, Verdict
from tests.stack import Stack

pytestmark = pytest.mark.full

INVOCATION = [27, 0, 29]
"""The bytes of "<!>" in the tiny tokenizer."""
OTHER = [27, 27]
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def folders(tiny: Tiny) -> dict[str, Path]:
    return {
        name: write_adapter(
            tiny.shape,
            tiny.folder / name,
            rank=8,
            seed=seed,
            b_std=0.5,
            alora_invocation_tokens=invocation,
        )
        for seed, (name, invocation) in enumerate(
            {"checker": INVOCATION, "judge": OTHER, "plain": None}.items()
        )
    }


@pytest.fixture(scope="module")
def key(stack: Stack, folders: dict[str, Path]) -> str:
    key = stack.create_tenant("acme")
    for name, folder in folders.items():
        stack.push(folder, name, "acme")
    return key


def complete(stack: Stack, key: str, model: str, prompt: Any, **options: Any) -> Any:
    with stack.openai(key, timeout=60) as client:
        return client.completions.with_raw_response.create(
            model=model,
            prompt=prompt,
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            **options,
        )


def cached(stack: Stack, key: str, model: str, prompt: list[int]) -> int:
    usage = complete(stack, key, model, prompt).parse().usage
    return usage.prompt_tokens_details.cached_tokens


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(64, 90) for _ in range(length)]


def test_answers_equal_peft_prompt_by_prompt(
    stack: Stack, key: str, tiny: Tiny, folders: dict[str, Path]
) -> None:
    """Several prompts a request, several choices a prompt: each activated where it says, or not."""
    prompts = [
        INVOCATION + text(1, 10),
        text(1, 40) + INVOCATION,
        text(1, 40) + INVOCATION + text(2, 7) + INVOCATION + text(3, 30),
        text(1, 40),
        text(1, 14) + OTHER + OTHER[:1],
    ]
    oracle = Oracle(tiny.model, folders)
    verdict = Verdict()
    for model in (*folders, NAME):
        raw = complete(stack, key, model, prompts, n=2)
        version = raw.headers.get("loraplex-adapter-version")
        assert version == (None if model == NAME else "1")
        answer = raw.parse()
        assert answer.model == model
        for choice in answer.choices:
            prompt, adapter = prompts[choice.index // 2], None if model == NAME else model
            oracle.judge(verdict, prompt, choice.token_ids, adapter, f"{model} {choice.index}")
    assert verdict.num_tokens == 4 * 2 * len(prompts) * NUM_TOKENS
    verdict.assert_equal()
    activated, base = oracle.logits(prompts[1], "checker"), oracle.logits(prompts[1], None)
    assert float((activated - base)[-1].abs().max()) > 0.1


def test_the_prefix_is_shared_up_to_the_invocation(stack: Stack, key: str) -> None:
    prefix = text(4, 80)
    assert cached(stack, key, "checker", prefix + INVOCATION) == 0
    assert cached(stack, key, NAME, [*prefix, 1]) == 80
    assert cached(stack, key, "judge", prefix + OTHER) == 80
    assert cached(stack, key, "judge", prefix[:60] + OTHER + prefix) == 48
    assert cached(stack, key, "plain", prefix + INVOCATION) == 0
    assert cached(stack, key, "checker", prefix + text(5, 20)) == 80


def test_another_tenant_shares_nothing(stack: Stack, key: str, folders: dict[str, Path]) -> None:
    stranger = stack.create_tenant("globex")
    stack.push(folders["checker"], "checker", "globex")
    prefix = text(6, 80)
    assert cached(stack, key, "checker", prefix + INVOCATION) == 0
    assert cached(stack, stranger, "checker", prefix + INVOCATION) == 0
    assert cached(stack, stranger, NAME, [*prefix, 1]) == 80


def test_a_chat_may_invoke_it(stack: Stack, key: str, tiny: Tiny, folders: dict[str, Path]) -> None:
    messages: Any = [{"role": "user", "content": "is this right? <!>"}]
    with stack.openai(key, timeout=60) as client:
        rendered = client.post(
            f"{stack.url}/tokenize", body={"model": NAME, "messages": messages}, cast_to=object
        )
        answer: Any = client.chat.completions.create(
            model="checker",
            messages=messages,
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
    tokens: list[int] = rendered["tokens"]  # pyright: ignore
    verdict = Verdict()
    oracle = Oracle(tiny.model, folders)
    oracle.judge(verdict, tokens, answer.choices[0].token_ids, "checker", "chat")
    verdict.assert_equal()
    difference = oracle.logits(tokens, "checker") - oracle.logits(tokens, None)
    assert float(difference[-1].abs().max()) > 0.1
