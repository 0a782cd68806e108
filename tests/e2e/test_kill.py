"""kill -9 of the worker and of the gateway amid uploads, promotes and loads.

Nothing acknowledged is lost, nothing is half there, and all is served again soon after.
"""

from __future__ import annotations

import io
import random
import tarfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import psutil
import pytest

from tests.doubles import write_adapter
from tests.e2e.tiny import Tiny
from tests.oracle import Oracle, Verdict
from tests.scale import scaled
from tests.stack import PLAIN, Stack, running

pytestmark = pytest.mark.full

SEED = 20
NUM_KILLS = scaled(2, 50)
NUM_BOT_VERSIONS = 4
NUM_TOKENS = 8
BACK_S = 150.0
"""Ten times what is asked."""
PART_BYTES = 16 << 10
NUM_PROMPTS = 8
"""Few, so that the oracle computes each answer once, however often it was given."""
PAUSE_S = 0.1
"""Between two uploads, each of which a worker proves."""
FILES = ("adapter_config.json", "adapter_model.safetensors")


T = TypeVar("T", bound="Client")


@dataclass
class Ledger:
    """What the server has acknowledged, and what it answered."""

    uploads: dict[str, Path] = field(default_factory=dict[str, Path])
    """Adapters of one version, by name, to their files."""
    answers: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    """(name or name@version, prompt, answer)."""
    num_moves: int = 0
    broken: list[str] = field(default_factory=list[str])
    """Promises not kept."""

    def check(self, kept: bool, promise: str) -> None:
        if not kept:
            self.broken.append(promise)


class Client:
    """One thread's way to the server."""

    def __init__(self, stack: Stack, key: str, ledger: Ledger, stop: threading.Event) -> None:
        self.http = httpx.Client(
            base_url=stack.url, headers={"Authorization": f"Bearer {key}"}, timeout=60
        )
        self.ledger = ledger
        self.stop = stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """None if the answer was lost, or is that of a server on its way up or down."""
        try:
            answer = self.http.request(method, path, **options)
        except httpx.TransportError:
            return None
        return None if answer.status_code in (500, 502, 503) else answer

    def insist(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Asks until there is an answer."""
        while (answer := self.ask(method, path, **options)) is None:
            time.sleep(0.05)
        return answer


class Uploader(Client):
    """New adapters, each until it is acknowledged: whole, or in parts."""

    def run(self, make: Callable[[int], Path]) -> None:
        rng = random.Random(SEED + 1)
        for number in range(10_000):
            if self.stop.is_set():
                return
            name, folder = f"a{number:04}", make(number)
            if rng.random() < 0.5:
                made = self._push(name, folder)
            else:
                made = self._push_in_parts(name, folder)
            self.ledger.check(made == 1, f"{name} was uploaded once and has version {made}")
            self.ledger.uploads[name] = folder
            self.stop.wait(PAUSE_S)

    def _push(self, name: str, folder: Path) -> int:
        files = [(part, (part, (folder / part).read_bytes())) for part in FILES]
        answer = self.insist("POST", "/admin/v1/adapters", data={"name": name}, files=files)
        assert answer.status_code in (200, 201, 202), answer.text
        return answer.json()["version"]

    def _push_in_parts(self, name: str, folder: Path) -> int:
        data = archive(folder)
        while True:
            body = {"bytes": len(data), "filename": "adapter.tar"}
            upload = self.insist("POST", "/admin/v1/uploads", json=body).json()["id"]
            self._send(upload, data)
            answer = self.ask("POST", "/admin/v1/adapters", json={"upload": upload, "name": name})
            if answer is None:
                found = self.insist("GET", f"/admin/v1/adapters/{name}")
                if found.status_code == 404:
                    continue
                answer = self.insist("GET", f"/admin/v1/adapters/{name}/versions/1")
            assert answer.status_code in (200, 201, 202), answer.text
            return answer.json()["version"]

    def _send(self, upload: str, data: bytes) -> None:
        """What was acknowledged is there, whatever died since."""
        path, acknowledged = f"/admin/v1/uploads/{upload}", 0
        while acknowledged < len(data):
            part = data[acknowledged : acknowledged + PART_BYTES]
            answer = self.ask(
                "PATCH", path, content=part, headers={"upload-offset": str(acknowledged)}
            )
            if answer is None or answer.status_code == 409:
                offset = self.insist("GET", path).json()["offset"]
                self.ledger.check(
                    acknowledged <= offset <= acknowledged + len(part),
                    f"upload {upload} had {acknowledged} bytes and now {offset}",
                )
                acknowledged = offset
            else:
                acknowledged += len(part)


class Promoter(Client):
    """Moves `bot` between its versions; it is always where it was last put."""

    def run(self) -> None:
        rng = random.Random(SEED + 2)
        path = "/admin/v1/adapters/bot/aliases/prod"
        possible = {self.insist("GET", path).json()["version"]}
        while not self.stop.is_set():
            target = rng.randrange(NUM_BOT_VERSIONS) + 1
            answer = self.ask("PUT", path, json={"version": target})
            if answer is None:
                possible.add(target)
            else:
                assert answer.status_code == 200, answer.text
                possible = {target}
                self.ledger.num_moves += 1
            answer = self.insist("GET", path)
            assert answer.status_code == 200, answer.text
            found = answer.json()["version"]
            self.ledger.check(found in possible, f"bot is at {found}, not at {possible}")
            possible = {found}
            time.sleep(0.05)


class Caller(Client):
    """Asks what is ready; a request fails only with the process that served it."""

    def run(self, seed: int, ready: list[str], prompts: list[list[int]]) -> None:
        rng = random.Random(SEED + seed)
        while not self.stop.is_set():
            name = rng.choice(["bot", rng.choice(ready)])
            prompt = rng.choice(prompts)
            answer = self.ask("POST", "/v1/completions", json=body_of(name, prompt))
            if answer is None:
                time.sleep(0.05)
                continue
            self.ledger.check(answer.status_code == 200, f"{name}: {answer.text}")
            if answer.status_code == 200:
                version = answer.headers["loraplex-adapter-version"]
                tokens = answer.json()["choices"][0]["token_ids"]
                served = f"bot@{version}" if name == "bot" else name
                self.ledger.answers.append((served, prompt, tokens))


def body_of(model: str, prompt: list[int]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def archive(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for part in FILES:
            tar.add(folder / part, part)
    return buffer.getvalue()


def pid_of(stack: Stack, role: str) -> int:
    """The child of the supervisor that runs `role`; waits while there is none."""
    deadline = time.monotonic() + BACK_S
    while time.monotonic() < deadline:
        for child in psutil.Process(stack.pid).children():
            if role in " ".join(child.cmdline()):
                return child.pid
        time.sleep(0.05)
    raise AssertionError(f"no process runs {role}")


def wait_ready(client: Client, name: str, version: int = 1) -> None:
    path = f"/admin/v1/adapters/{name}/versions/{version}"
    deadline = time.monotonic() + BACK_S
    while (found := client.insist("GET", path).json())["state"] != "ready":
        assert time.monotonic() < deadline, found
        assert found["state"] in ("validating", "proving"), found
        time.sleep(0.1)


def listed_names(client: Client) -> set[str]:
    names: set[str] = set()
    after, has_more = "", True
    while has_more:
        page = client.insist("GET", "/admin/v1/adapters", params={"limit": 1000, "after": after})
        found = [adapter["name"] for adapter in page.json()["data"]]
        has_more = page.json()["has_more"]
        names |= set(found)
        after = found[-1]
    return names


def wait_served(client: Client) -> float:
    """Seconds until a request is answered."""
    start = time.monotonic()
    while True:
        answer = client.ask("POST", "/v1/completions", json=body_of("bot", [1, 2, 3]))
        if answer is not None and answer.status_code == 200:
            return time.monotonic() - start
        assert time.monotonic() - start < BACK_S, answer and answer.text
        time.sleep(0.05)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_killed_amid_uploads_promotes_and_loads(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path)
    bots = [
        write_adapter(tiny.shape, tmp_path / "bot" / str(i), rank=4, seed=i, b_std=0.5)
        for i in range(NUM_BOT_VERSIONS)
    ]

    def make(number: int) -> Path:
        folder = tmp_path / "made" / str(number)
        return write_adapter(tiny.shape, folder, rank=4, seed=1000 + number, b_std=0.5)

    rng, ledger, stop = random.Random(SEED), Ledger(), threading.Event()
    # More than 60 changes a minute would be refused.
    limits: dict[str, object] = {"max_num_seqs": 16, "tenant_writes_per_minute": 100_000}
    stack = tiny.stack(command=PLAIN, memory="4MiB", max_loaded_adapters=4, **limits)
    with running(stack), ExitStack() as clients:
        key = stack.create_tenant("acme")

        def connect(kind: type[T]) -> T:
            return clients.enter_context(kind(stack, key, ledger, stop))

        main = connect(Client)
        for folder in bots:
            stack.push(folder, "bot", "acme")
        others = [make(5000 + i) for i in range(8)]
        for i, folder in enumerate(others):
            stack.push(folder, f"other{i}", "acme")
        names = [f"other{i}" for i in range(len(others))]
        prompts = [
            [rng.randrange(256) for _ in range(rng.randrange(4, 40))] for _ in range(NUM_PROMPTS)
        ]
        callers = [connect(Caller) for _ in range(3)]
        threads = [
            threading.Thread(target=connect(Uploader).run, args=(make,)),
            threading.Thread(target=connect(Promoter).run),
            *(
                threading.Thread(target=caller.run, args=(3 + i, names, prompts))
                for i, caller in enumerate(callers)
            ),
        ]
        # A failure ends them too.
        clients.callback(stop.set)
        for thread in threads:
            thread.start()
        back_s: list[float] = []
        victims = ["worker_process", "loraplex gateway"] * (NUM_KILLS // 2)
        rng.shuffle(victims)
        for victim in victims:
            time.sleep(rng.uniform(0.2, 2.0))
            psutil.Process(pid_of(stack, victim)).kill()
            back_s.append(wait_served(main))
        deadline = time.monotonic() + BACK_S
        while not (
            ledger.uploads and ledger.num_moves > NUM_KILLS and len(ledger.answers) > 10 * NUM_KILLS
        ):
            assert time.monotonic() < deadline, "the clients have hardly been served"
            time.sleep(0.1)
        time.sleep(1.0)
        stop.set()
        for thread in threads:
            thread.join(BACK_S)
            assert not thread.is_alive()
        for name in ledger.uploads:
            wait_ready(main, name)
        for name in [*ledger.uploads][-8:]:
            prompt = [rng.randrange(256) for _ in range(12)]
            answer = main.insist("POST", "/v1/completions", json=body_of(name, prompt))
            assert answer.status_code == 200, answer.text
            tokens = answer.json()["choices"][0]["token_ids"]
            ledger.answers.append((name, prompt, tokens))
        listed = listed_names(main)
    assert not ledger.broken, ledger.broken[:5]
    assert listed >= {"bot", *names, *ledger.uploads}
    files = {f"bot@{i + 1}": folder for i, folder in enumerate(bots)}
    files |= dict(zip(names, others, strict=True)) | ledger.uploads
    used = sorted({name for name, _, _ in ledger.answers})
    oracle, verdict = Oracle(tiny.model, {oracle_name(n): files[n] for n in used}), Verdict()
    different = {(name, tuple(prompt), tuple(tokens)) for name, prompt, tokens in ledger.answers}
    for name, prompt, tokens in different:
        oracle.judge(verdict, list(prompt), list(tokens), oracle_name(name), name)
    verdict.assert_equal(max_ties=2 + len(different) // 500)
    print(
        f"{NUM_KILLS} kills, {len(ledger.uploads)} uploads, {ledger.num_moves} moves, "
        f"{len(ledger.answers)} answers; served again after {max(back_s):.1f} s at most"
    )


def oracle_name(name: str) -> str:
    """peft takes no dots in a name, torch modules no other signs."""
    return name.replace("@", "_")
