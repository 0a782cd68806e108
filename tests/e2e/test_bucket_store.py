"""The whole product on a store in a bucket: models and adapters come from there, and what is cached
here serves on when it does not answer."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import httpx
import pytest

from tests.buckets import BUCKET, s3_server
from tests.doubles import write_adapter
from tests.e2e import demo
from tests.e2e.tiny import Tiny
from tests.oracle import Oracle, Verdict
from tests.stack import PLAIN, Stack, running

pytestmark = pytest.mark.full

PROMPT = [5, 17, 200, 33, 8]


def push(stack: Stack, folder: Path) -> httpx.Response:
    files = {path.name: (path.name, path.read_bytes()) for path in folder.iterdir()}
    with stack.admin as admin:
        return admin.post("/adapters", data={"name": folder.name, "tenant": "acme"}, files=files)


def test_everything_comes_from_the_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Tiny(tmp_path)
    folders = {
        f"a{i}": write_adapter(tiny.shape, tmp_path / f"a{i}", rank=4, seed=i, b_std=0.5)
        for i in range(3)
    }
    oracle = Oracle(tiny.model, folders)
    verdict = Verdict()

    def ask(key: str, name: str) -> None:
        with stack.openai(key, timeout=60) as client:
            answer = demo.complete(client, name, PROMPT, 12)
        oracle.judge(verdict, PROMPT, answer, name, name)

    with contextlib.ExitStack() as bucket:
        for name, value in bucket.enter_context(s3_server()).items():
            monkeypatch.setenv(name, value)
        # As obstore has threads, what used it cannot be forked, and the product does not.
        stack = tiny.stack(command=PLAIN, store=f"s3://{BUCKET}/prefix")
        with running(stack):
            key = stack.create_tenant("acme")
            for name in ("a0", "a1"):
                stack.push(folders[name], name, "acme")
            ask(key, "a0")
            stack.stop()
            shutil.rmtree(stack.data_dir / "cache")  # as on another machine
            stack.start()
            ask(key, "a0")
            ask(key, "a1")

            bucket.close()
            ask(key, "a1")
            refused = push(stack, folders["a2"])
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503,
                "store_unavailable",
            )
            assert not list((stack.data_dir / "cache" / "store" / "incoming").iterdir())
    verdict.assert_equal()
