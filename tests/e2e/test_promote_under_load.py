"""Aliases that move under load, and names that must not matter: each answer is that of one version
alone, and pages are shared inside a version and never beyond."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types import CompletionChoice

from tests.doubles import write_adapter
from tests.e2e.tiny import NAME, Tiny
from tests.oracle import Oracle, Verdict
from tests.scale import scaled
from tests.stack import Stack, running
from tests.waiting import until

pytestmark = pytest.mark.full

MOVE_EVERY_S = 0.5
DURATION_S = scaled(4, 60)
LONGEST_S = 120.0
"""Beyond it, until each version has answered."""
NUM_STREAMS = scaled(12, 50)
NUM_READERS, READ_TOKENS = 16, 1200
"""They outlast the answer to who deletes what they read."""
NUM_TOKENS = 16
NUM_PROMPTS = 6
PAGE = 16
SEEN_WITHIN_S = scaled(60, 5)
"""Ten times what a gateway may take to hear of a move; more in the suite, which shares its
machine."""


@dataclass
class Answer:
    prompt: int
    version: int
    tokens: list[int]
    cached_tokens: int
    started: float
    ended: float


def stream(
    client: OpenAI, model: str, prompt: list[int], **extra: Any
) -> tuple[Any, list[int], int]:
    """(headers, tokens, prompt tokens that came from the cache) of a greedy streamed answer."""
    with client.completions.with_streaming_response.create(
        model=model,
        prompt=prompt,
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True, **extra},
    ) as response:
        tokens: list[int] = []
        cached = -1
        for event in response.parse():
            for choice in event.choices:
                tokens += token_ids(choice)
            if event.usage is not None and event.usage.prompt_tokens_details is not None:
                cached = event.usage.prompt_tokens_details.cached_tokens or 0
        assert len(tokens) == NUM_TOKENS
        assert cached >= 0
        return response.headers, tokens, cached


def token_ids(choice: CompletionChoice) -> list[int]:
    assert choice.model_extra is not None
    return choice.model_extra["token_ids"]


@pytest.fixture(scope="module")
def stack(tiny: Tiny) -> Iterator[Stack]:
    with running(tiny.stack(memory="64MiB", max_num_seqs=64)) as stack:
        yield stack


def make(tiny: Tiny, seed: int) -> Path:
    folder = tiny.folder / "adapters" / str(seed)
    return (
        folder
        if folder.exists()
        else write_adapter(tiny.shape, folder, rank=4, seed=seed, b_std=0.5)
    )


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_an_alias_that_moves_under_load(tiny: Tiny, stack: Stack) -> None:
    rng = random.Random(7)
    key = stack.create_tenant("mover")
    folders = {version: make(tiny, version) for version in (1, 2, 3)}
    for folder in folders.values():
        stack.push(folder, "bot", "mover")
    shared = [rng.randrange(256) for _ in range(3 * PAGE)]
    prompts = [[*shared, *(rng.randrange(256) for _ in range(9))] for _ in range(NUM_PROMPTS)]
    answers: list[Answer] = []
    end = time.monotonic() + DURATION_S
    over = threading.Event()

    def call(number: int) -> None:
        own = random.Random(number)
        with stack.openai(key, timeout=120) as client:
            while not over.is_set():
                started = time.monotonic()
                prompt = own.randrange(NUM_PROMPTS)
                headers, tokens, cached = stream(client, "bot", prompts[prompt])
                version = int(headers["loraplex-adapter-version"])
                answers.append(Answer(prompt, version, tokens, cached, started, time.monotonic()))

    moves: list[int] = []

    def move() -> None:
        """Until the end, and until each version has answered."""
        with stack.admin as admin:
            path, version = "/adapters/bot/aliases/prod", 1
            for number in range(1 << 20):
                asked = time.monotonic()
                if asked >= end and {answer.version for answer in answers} == set(folders):
                    return
                assert asked < end + LONGEST_S, "a version has not answered"
                if number % 4 == 3:
                    moved = admin.post(f"{path}/rollback", params={"tenant": "mover"})
                else:
                    version = version % 3 + 1
                    body = {"version": version}
                    moved = admin.put(path, params={"tenant": "mover"}, json=body)
                assert moved.status_code == 200, moved.text
                version = moved.json()["version"]
                moves.append(version)
                time.sleep(max(0.0, asked + MOVE_EVERY_S - time.monotonic()))

    with ThreadPoolExecutor(NUM_STREAMS + 1) as pool:
        mover = pool.submit(move)
        mover.add_done_callback(lambda _: over.set())
        for caller in [pool.submit(call, number) for number in range(NUM_STREAMS)]:
            caller.result()
        mover.result()
    with stack.openai(key, timeout=120) as client:
        for wanted in (moves[-1] % 3 + 1, moves[-1]):
            expect_seen(stack, client, prompts[0], wanted)

    assert len(answers) > NUM_STREAMS
    oracle = Oracle(tiny.model, {f"v{version}": folder for version, folder in folders.items()})
    verdict = Verdict()
    for version, prompt, tokens in {(a.version, a.prompt, tuple(a.tokens)) for a in answers}:
        oracle.judge(verdict, prompts[prompt], list(tokens), f"v{version}", f"bot@{version}")
    verdict.assert_equal()
    assert {answer.version for answer in answers} == {1, 2, 3}
    expect_warm(answers)
    print(f"{len(answers)} streams of {NUM_STREAMS} callers, {len(moves)} moves")


def expect_seen(stack: Stack, client: OpenAI, prompt: list[int], wanted: int) -> None:
    """The alias moves to `wanted`; requests get that soon, and then nothing else."""
    with stack.admin as admin:
        path, query = "/adapters/bot/aliases/prod", {"tenant": "mover"}
        assert admin.put(path, params=query, json={"version": wanted}).status_code == 200

    def served() -> int:
        return int(stream(client, "bot", prompt)[0]["loraplex-adapter-version"])

    until(lambda: served() == wanted, timeout_s=SEEN_WITHIN_S)
    assert {served() for _ in range(20)} == {wanted}


def expect_warm(answers: list[Answer]) -> None:
    """A prompt that its version has answered before comes from the cache up to its last page."""
    first_ended: dict[tuple[int, int], float] = {}
    for answer in sorted(answers, key=lambda a: a.ended):
        first_ended.setdefault((answer.version, answer.prompt), answer.ended)
    again = [a for a in answers if a.started > first_ended[a.version, a.prompt]]
    assert len(again) > NUM_STREAMS
    assert {answer.cached_tokens for answer in again} == {3 * PAGE}


class Names:
    """Adapters of tenants, by names that mean nothing to the cache."""

    def __init__(self, tiny: Tiny, stack: Stack) -> None:
        self._tiny = tiny
        self._stack = stack
        self._clients: dict[str, OpenAI] = {}
        self.asked: list[tuple[list[int], list[int], int | None, str]] = []
        """(prompt, answer, seed of the weights, what)."""

    def client(self, tenant: str) -> OpenAI:
        if tenant not in self._clients:
            key = self._stack.create_tenant(tenant)
            self._clients[tenant] = self._stack.openai(key, timeout=120)
        return self._clients[tenant]

    def push(self, tenant: str, name: str, seed: int, alias: str = "prod") -> str:
        self.client(tenant)
        return self._stack.push(make(self._tiny, seed), name, tenant, alias=alias)["digest"]

    def ask(
        self, tenant: str, model: str, seed: int | None, prompt: list[int], **extra: Any
    ) -> int:
        """How much came from the cache; the answer is judged at the end."""
        what = f"{tenant}: {model} {extra}"
        _, tokens, cached = stream(self.client(tenant), model, prompt, **extra)
        self.asked.append((prompt, tokens, seed, what))
        return cached

    def ask_twice(
        self, tenant: str, model: str, seed: int | None, prompt: list[int], **extra: Any
    ) -> None:
        """Nothing of anybody else's is there the first time, and all of one's own the second."""
        assert self.ask(tenant, model, seed, prompt, **extra) == 0, (tenant, model, extra)
        assert self.ask(tenant, model, seed, prompt, **extra) == 3 * PAGE, (tenant, model, extra)

    def judge(self) -> None:
        seeds = sorted({seed for _, _, seed, _ in self.asked if seed is not None})
        oracle = Oracle(self._tiny.model, {f"s{seed}": make(self._tiny, seed) for seed in seeds})
        verdict = Verdict()
        for prompt, tokens, seed, what in self.asked:
            adapter = None if seed is None else f"s{seed}"
            oracle.judge(verdict, prompt, tokens, adapter, what)
        verdict.assert_equal()


def test_names_share_nothing(tiny: Tiny, stack: Stack) -> None:
    """A name that is uploaded again with other weights, the same name in two tenants, and names
    equal to salts, tenants and digests: each answers as its own cold run, from its own pages."""
    rng = random.Random(8)
    prompt = [rng.randrange(256) for _ in range(3 * PAGE + 5)]
    names = Names(tiny, stack)

    names.push("acme", "helper", seed=11)
    names.ask_twice("acme", "helper", 11, prompt)
    digest = names.push("acme", "helper", seed=12)
    names.ask_twice("acme", "helper", 12, prompt)
    assert names.ask("acme", "helper@1", 11, prompt) == 3 * PAGE

    # Under the same name, other weights; then the very same weights in another tenant.
    names.push("globex", "helper", seed=13)
    names.ask_twice("globex", "helper", 13, prompt)
    names.push("globex", "copy", seed=12)
    names.ask_twice("globex", "copy", 12, prompt)
    for tenant in ("acme", "globex"):
        names.ask_twice(tenant, NAME, None, prompt)

    for salt in ("helper", "acme", "globex", "prod", "base", digest):
        names.ask_twice("globex", "helper", 13, prompt, cache_salt=salt)
        names.ask_twice("acme", "helper", 12, prompt, cache_salt=salt)
    for name in ("acme", "globex", "base", digest[:32]):
        names.push("globex", name, seed=14)
        cached = names.ask("globex", name, 14, prompt)
        assert cached == (0 if name == "acme" else 3 * PAGE), name
        assert names.ask("globex", name, 14, prompt, cache_salt=name) == 0, name
    names.judge()


def test_a_deleted_name_that_comes_back_has_nothing_of_before(tiny: Tiny, stack: Stack) -> None:
    rng = random.Random(9)
    prompt = [rng.randrange(256) for _ in range(3 * PAGE + 5)]
    names = Names(tiny, stack)
    names.push("phoenix", "bot", seed=21)
    names.ask_twice("phoenix", "bot", 21, prompt)
    with stack.admin as admin:
        gone = admin.delete("/adapters/bot", params={"tenant": "phoenix"})
        assert gone.json()["in_flight"] == 0, gone.text
    names.push("phoenix", "bot", seed=22)
    names.ask_twice("phoenix", "bot", 22, prompt)
    names.judge()


def test_deleting_under_load_ends_no_stream(tiny: Tiny, stack: Stack) -> None:
    """The answer tells the streams that still have the version; they end as they would have."""
    key = stack.create_tenant("shredder")
    for seed in (31, 32):
        stack.push(make(tiny, seed), "bot", "shredder")
    prompt = list(range(40))
    begun, results = threading.Barrier(NUM_READERS + 1), []

    def read(number: int) -> None:
        with stack.openai(key, timeout=120) as client:
            answer = client.completions.create(
                model="bot@2",
                prompt=[number, *prompt],
                max_tokens=READ_TOKENS,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            tokens: list[int] = list(token_ids(next(answer).choices[0]))
            begun.wait(60)
            for event in answer:
                for choice in event.choices:
                    tokens += token_ids(choice)
            results.append(([number, *prompt], tokens))

    with ThreadPoolExecutor(NUM_READERS) as pool:
        readers = [pool.submit(read, number) for number in range(NUM_READERS)]
        begun.wait(60)
        with stack.admin as admin:
            path, query = "/adapters/bot/versions/2", {"tenant": "shredder"}
            gone = admin.delete(path, params=query).json()
            assert 1 <= gone["in_flight"] <= NUM_READERS
            with stack.openai(key) as client:
                refused = client.completions.with_raw_response
                with pytest.raises(Exception, match="bot@2"):
                    refused.create(model="bot@2", prompt=prompt, max_tokens=1)
            for reader in readers:
                reader.result()
            until(lambda: admin.get(path, params=query).status_code == 404)
    oracle, verdict = Oracle(tiny.model, {"s32": make(tiny, 32)}), Verdict()
    for asked, tokens in results:
        assert len(tokens) == READ_TOKENS
        oracle.judge(verdict, asked, tokens, "s32", "bot@2")
    verdict.assert_equal()
