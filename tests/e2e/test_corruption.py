"""Bytes that change on disk under a running server: nobody is served by them, everybody else goes
on, and who looks at the adapter sees why."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, OpenAI

from tests.doubles import write_adapter
from tests.e2e import demo
from tests.e2e.tiny import NAME, Tiny
from tests.stack import Stack, running
from tests.waiting import until

pytestmark = pytest.mark.full

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PROMPT = list(range(40, 60))
NUM_TOKENS = 12
DEADLINE_S = 100
"""Of what takes some seconds: a failed load is tried again after five."""


def flip(path: Path, position: int = -9) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    rewrite(path, bytes(raw))


def cut(path: Path) -> None:
    rewrite(path, path.read_bytes()[:-100])


def rewrite(path: Path, raw: bytes) -> None:
    """In place, as a failing disk would."""
    path.chmod(0o600)
    path.write_bytes(raw)


@dataclass(frozen=True)
class Damage:
    """in_store, in_cache: what is done to the adapter's folder, to its packed image. code: of the
    error that its callers must then meet; None: healed from the store."""

    in_store: Callable[[Path], object] | None
    in_cache: Callable[[Path], object]
    code: str | None = None


DAMAGES = {
    "image-payload": Damage(None, flip),
    "image-header": Damage(None, lambda path: flip(path, 60)),
    "image-cut": Damage(None, cut),
    "image-gone": Damage(None, os.unlink),
    "weights": Damage(lambda at: flip(at / WEIGHTS), os.unlink, "adapter.store.corrupt"),
    "weights-cut": Damage(lambda at: cut(at / WEIGHTS), flip, "adapter.store.corrupt"),
    "config": Damage(lambda at: flip(at / CONFIG), cut, "adapter.store.corrupt"),
    "folder-gone": Damage(
        lambda at: at.rename(at.with_suffix(".gone")), os.unlink, "adapter.store.missing"
    ),
}
FILLERS = [f"filler-{number}" for number in range(6)]
STREAMED = ["streamed-0", "streamed-1"]


@dataclass
class Streams:
    """Adapters in use all the while: each answer must be the one from before."""

    client: OpenAI
    expected: dict[str, list[int]]
    num_answers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMED, 0))
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self, name: str) -> None:
        while not self.stopping.is_set():
            tokens: list[int] = []
            for event in self.client.completions.create(
                model=name,
                prompt=PROMPT,
                max_tokens=NUM_TOKENS,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            ):
                for choice in event.choices:
                    assert choice.model_extra is not None
                    tokens += choice.model_extra.get("token_ids") or []
            assert tokens == self.expected[name]
            self.num_answers[name] += 1


class Tenant:
    """A stack with more adapters than fit anywhere but on disk."""

    def __init__(self, stack: Stack, tiny: Tiny, client: OpenAI) -> None:
        self.stack = stack
        self.client = client
        folders = {
            name: write_adapter(
                tiny.shape, tiny.folder / "adapters" / name, rank=4, seed=seed, b_std=2.0
            )
            for seed, name in enumerate([*DAMAGES, *FILLERS, *STREAMED])
        }
        with ThreadPoolExecutor(4) as threads:
            made = threads.map(lambda name: stack.push(folders[name], name, "acme"), folders)
            self.digests = {name: each["digest"] for name, each in zip(folders, made, strict=True)}

    def ask(self, name: str) -> list[int]:
        return demo.complete(self.client, name, PROMPT, NUM_TOKENS)

    def refusal(self, name: str) -> str | None:
        """The code of the error, None for an answer."""
        try:
            self.ask(name)
        except APIStatusError as error:
            return error.code
        return None

    def folder(self, name: str) -> Path:
        (found,) = self.stack.data_dir.rglob(f"adapters/{self.digests[name]}")
        return found

    def image(self, name: str) -> Path:
        (folder,) = {path.parent for path in self.stack.data_dir.rglob("*.img")}
        return folder / f"{self.digests[name]}.img"

    def faults(self, name: str) -> list[dict[str, Any]]:
        """Of the one version."""
        with self.stack.admin as admin:
            answer = admin.get(f"/adapters/{name}", params={"tenant": "acme"}).json()
        (version,) = answer["versions"]
        assert version["state"] == "ready"
        return version["faults"]

    def shown_faults(self, name: str) -> list[dict[str, Any]]:
        """As an operator at a terminal sees them."""
        shown = json.loads(self.stack.cli("adapter", "show", name, "--tenant", "acme", "--json"))
        return shown["versions"][0]["faults"]


def test_damage_is_refused_or_healed_shown_and_forgotten(tiny: Tiny) -> None:
    stack = tiny.stack(memory="2MiB", max_loaded_adapters=4, host_adapter_memory="64KiB")
    with running(stack), ThreadPoolExecutor(len(STREAMED)) as threads:
        key = stack.create_tenant("acme")
        with stack.openai(key, timeout=60) as client:
            tenant = Tenant(stack, tiny, client)
            right = {name: tenant.ask(name) for name in tenant.digests}
            base = tenant.ask(NAME)
            assert len({tuple(answer) for answer in [base, *right.values()]}) == len(right) + 1
            streams = Streams(client, right)
            running_streams = [threads.submit(streams.run, name) for name in STREAMED]
            try:
                damage_and_mend(tenant, right)
            finally:
                streams.stopping.set()
            for stream in running_streams:
                stream.result()
            assert min(streams.num_answers.values()) > 10


def damage_and_mend(tenant: Tenant, right: dict[str, list[int]]) -> None:
    whole: dict[Path, bytes] = {}
    for name, damage in DAMAGES.items():
        image, folder = tenant.image(name), tenant.folder(name)
        whole[image] = image.read_bytes()
        if damage.in_store is not None:
            whole |= {path: path.read_bytes() for path in folder.iterdir()}
            damage.in_store(folder)
        damage.in_cache(image)
    left = set(DAMAGES)
    deadline = time.monotonic() + DEADLINE_S
    while left:
        assert time.monotonic() < deadline, f"{left} are still in memory"
        for name in FILLERS * 3:
            assert tenant.ask(name) == right[name]
        for name in sorted(left):
            damage, image = DAMAGES[name], tenant.image(name)
            try:
                assert tenant.ask(name) == right[name], "the adapter itself or nothing"
            except APIStatusError as error:
                assert damage.code is not None and error.code == "adapter_unavailable"
                left.discard(name)
            else:
                is_healed = image.exists() and image.read_bytes() == whole[image]
                if is_healed and damage.code is None:
                    left.discard(name)
    for name, damage in DAMAGES.items():
        if damage.code is None:
            assert tenant.faults(name) == []
            continue
        until(lambda name=name: tenant.faults(name) != [], name)
        (fault,) = tenant.faults(name)
        assert fault["code"] == damage.code and tenant.digests[name] in fault["message"]
        assert tenant.refusal(name) == "adapter_unavailable"
    assert tenant.shown_faults("weights")[0]["code"] == "adapter.store.corrupt"
    for path in [path for path in whole if path.suffix != ".img"]:
        gone = path.parent.with_suffix(".gone")
        if gone.exists():
            gone.rename(path.parent)
        rewrite(path, whole[path])
    for name, damage in DAMAGES.items():
        if damage.code is not None:
            until(lambda name=name: tenant.refusal(name) is None, name)
            assert tenant.ask(name) == right[name]
            assert tenant.image(name).read_bytes() == whole[tenant.image(name)]
            until(lambda name=name: tenant.faults(name) == [], name)
    assert tenant.shown_faults("weights") == []
