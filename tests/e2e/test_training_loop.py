"""A training loop beside its server: adapters loaded by vLLM's routes under one name, over and
over, while clients stream from it. Each answer is that of exactly the version it was asked of."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

from adapters.format.validator import CONFIG_NAME, WEIGHTS_NAME
from tests.doubles import write_adapter
from tests.e2e.test_promote_under_load import PAGE, stream
from tests.e2e.tiny import NAME, Tiny
from tests.oracle import Oracle, Verdict
from tests.scale import scaled
from tests.stack import Stack, running

pytestmark = pytest.mark.full

NUM_SEEDS = 4
NUM_REFRESHES = scaled(30, 500)
NUM_CALLERS = 4
KEPT = 3
SLACK_BYTES = 24 << 20
"""Growth of resident memory that is no leak: arenas and connections of the processes."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    tiny = Tiny(tmp_path_factory.mktemp("tiny"))
    for seed in range(NUM_SEEDS):
        write_adapter(tiny.shape, checkpoint(tiny, seed), rank=32, seed=seed, b_std=0.5)
    return tiny


def checkpoint(tiny: Tiny, seed: int) -> Path:
    return tiny.folder / "checkpoints" / str(seed)


@pytest.fixture(scope="module")
def stack(tiny: Tiny) -> Iterator[Stack]:
    settings = {
        # Small, so that pages of earlier versions have filled it before memory is measured.
        "memory": "16MiB",
        "host_adapter_memory": "8MiB",
        "adapter_roots": f"trainer={tiny.folder / 'checkpoints'}",
        "ephemeral_versions": KEPT,
        "tenant_writes_per_minute": 100_000,
    }
    with running(tiny.stack(**settings)) as stack:
        yield stack


@pytest.fixture(scope="module")
def key(stack: Stack) -> str:
    return stack.create_tenant("trainer")


@pytest.fixture
def loop(stack: Stack, key: str) -> Iterator[httpx.Client]:
    """What a training loop calls with."""
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"{stack.url}/v1", headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
def caller(stack: Stack, key: str) -> Iterator[OpenAI]:
    with stack.openai(key, timeout=120) as client:
        yield client


def load(loop: httpx.Client, name: str, folder: Path, *, in_place: bool = True) -> int:
    """The number of the version."""
    body = {"lora_name": name, "lora_path": str(folder), "load_inplace": in_place}
    answer = loop.post("/load_lora_adapter", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.text == f"Success: LoRA adapter '{name}' added successfully."
    return int(answer.headers["loraplex-adapter-version"])


def test_a_loop_loads_calls_reloads_and_unloads(
    tiny: Tiny, loop: httpx.Client, caller: OpenAI
) -> None:
    oracle = Oracle(tiny.model, {str(seed): checkpoint(tiny, seed) for seed in range(2)})
    verdict = Verdict()
    prompt = [random.Random(3).randrange(256) for _ in range(40)]

    def ask(version: int, seed: int, model: str = "policy") -> None:
        headers, tokens, _ = stream(caller, model, prompt)
        assert int(headers["loraplex-adapter-version"]) == version
        oracle.judge(verdict, prompt, tokens, str(seed), model)

    ask(load(loop, "policy", checkpoint(tiny, 0), in_place=False), 0)
    assert {"policy", NAME} <= {model.id for model in caller.models.list()}
    files = {
        name: (checkpoint(tiny, 1) / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)
    }
    inline = loop.post(
        "/load_lora_adapter",
        data={"lora_name": "policy", "load_inplace": "true"},
        files={name: (name, data) for name, data in files.items()},
    )
    assert inline.status_code == 200, inline.text
    ask(2, 1)
    ask(1, 0, "policy@1")
    answer = loop.post("/unload_lora_adapter", json={"lora_name": "policy"})
    assert answer.text == "Success: LoRA adapter 'policy' removed successfully."
    for model in ("policy", "policy@1", "policy@2"):
        with pytest.raises(openai.NotFoundError):
            stream(caller, model, prompt)
    verdict.assert_equal()


def test_the_public_document_has_the_routes(stack: Stack) -> None:
    document = httpx.get(f"{stack.url}/schema").json()
    load = document["paths"]["/v1/load_lora_adapter"]["post"]
    body = load["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = document["components"]["schemas"][body.rpartition("/")[2]]["properties"]
    assert {"lora_name", "lora_path", "load_inplace"} <= fields.keys()
    assert "/v1/unload_lora_adapter" in document["paths"]
    assert not any(path.startswith("/admin") for path in document["paths"])
    assert "/v1/load_lora_adapter" in httpx.get(f"{stack.url}/docs").text


def test_pages_of_an_ephemeral_version_are_its_own(
    tiny: Tiny, stack: Stack, loop: httpx.Client, caller: OpenAI
) -> None:
    """Neither a reload of the same files nor a pushed version of them finds its pages."""
    prompt = [random.Random(5).randrange(256) for _ in range(2 * PAGE + 5)]

    def num_cached(model: str) -> int:
        return stream(caller, model, prompt)[2]

    stack.push(checkpoint(tiny, 2), "pushed", "trainer")
    assert (num_cached("pushed"), num_cached("pushed")) == (0, 2 * PAGE)
    for _ in range(2):
        load(loop, "own", checkpoint(tiny, 2))
        assert (num_cached("own"), num_cached("own")) == (0, 2 * PAGE)
    assert num_cached("pushed") == 2 * PAGE
    load(loop, "other", checkpoint(tiny, 2))
    assert num_cached("other") == 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_refreshes_leave_memory_and_disk_flat(
    tiny: Tiny, stack: Stack, loop: httpx.Client, key: str
) -> None:
    rng = random.Random(11)
    prompts = [[rng.randrange(256) for _ in range(24)] for _ in range(4)]
    seeds: dict[int, int] = {}
    answers: set[tuple[int, int, tuple[int, ...]]] = set()
    finished = threading.Event()

    def refresh(number: int) -> None:
        seed = number % NUM_SEEDS
        version = load(loop, "flat", checkpoint(tiny, seed))
        seeds[version] = seed

    def call(number: int) -> None:
        own = random.Random(number)
        with stack.openai(key, timeout=120) as client:
            while not finished.is_set():
                prompt = own.randrange(len(prompts))
                headers, tokens, _ = stream(client, "flat", prompts[prompt])
                answers.add((prompt, int(headers["loraplex-adapter-version"]), tuple(tokens)))

    numbers = itertools.count()
    refresh(next(numbers))
    with ThreadPoolExecutor(NUM_CALLERS) as pool:
        callers = [pool.submit(call, number) for number in range(NUM_CALLERS)]
        try:
            for _ in range(NUM_REFRESHES // 3):
                refresh(next(numbers))
            before = resident_bytes(stack.pid)
            for _ in range(NUM_REFRESHES - NUM_REFRESHES // 3):
                refresh(next(numbers))
        finally:
            finished.set()
        for caller in callers:
            caller.result()
    after = resident_bytes(stack.pid)
    grown = sum(after.values()) - sum(before.values())
    assert grown < SLACK_BYTES, f"{grown} bytes more: {before} {after}"
    expect_reaped(tiny, stack)

    oracle = Oracle(tiny.model, {str(seed): checkpoint(tiny, seed) for seed in range(NUM_SEEDS)})
    verdict = Verdict()
    judged = {(prompt, seeds[version], tokens) for prompt, version, tokens in answers}
    for prompt, seed, tokens in judged:
        oracle.judge(verdict, prompts[prompt], list(tokens), str(seed), f"seed {seed}")
    verdict.assert_equal()
    versions = {version for _, version, _ in answers}
    print(
        f"{NUM_REFRESHES} refreshes, {len(answers)} answers of {len(versions)} versions,"
        f" {grown >> 20} MiB more"
    )


def expect_reaped(tiny: Tiny, stack: Stack) -> None:
    """Soon the store has only the contents that are kept, and no packed image has a file."""
    store = stack.data_dir / "store" / "adapters"
    deadline = time.monotonic() + 60
    while True:
        with stack.admin as admin:
            listed = admin.get("/adapters/flat/versions", params={"tenant": "trainer"}).json()
        # The other tests of this file have left contents of the same seeds.
        if len(listed["data"]) == KEPT and len(list(store.iterdir())) <= NUM_SEEDS:
            break
        assert time.monotonic() < deadline, listed
        time.sleep(0.2)
    assert {version["effect_proof"] for version in listed["data"]} == {"skipped"}
    images = list(stack.data_dir.rglob("*.img"))
    assert len(images) <= 1, images


def resident_bytes(pid: int) -> dict[str, int]:
    """Private resident memory of a process and of all that it has started, Postgres included, by
    what they run."""
    children: dict[int, list[int]] = {}
    pages: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            shared = (folder / "statm").read_text().split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(folder.name))
        pages[int(folder.name)] = int(shared[1]) - int(shared[2])
    total, waiting = Counter[str](), [pid]
    while waiting:
        each = waiting.pop()
        with contextlib.suppress(OSError):
            name = (Path("/proc") / str(each) / "cmdline").read_bytes().replace(b"\0", b" ")
            total[name.decode()[-60:]] += pages.get(each, 0) * 4096
        waiting += children.get(each, [])
    return total
