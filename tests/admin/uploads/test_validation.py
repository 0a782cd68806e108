"""The validator apart: the same verdicts, its bounds, and what happens when processes die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from adapters.errors import AdapterRejected
from adapters.format.module_list import read_module_list
from adapters.format.validator import AdapterFiles, Limits, validate_and_list
from adapters.manifest import BaseModelShape
from admin.uploads.validation import BOUNDS, MAX_VALIDATIONS, Validation
from store.errors import Invalid
from tests.adapters.files import BASE, CONFIG, encode, tensor_name, validate, write, write_adapter
from tests.adapters.format.test_malformed import CONFIGS, GOOD, WEIGHTS
from tests.preloaded import ROOT
from web.errors import TooLarge

MAX_FILE_BYTES = 4 << 30
WIDE = msgspec.structs.replace(BASE, num_layers=2, hidden_size=1 << 19)
ENDLESS = msgspec.structs.replace(WIDE, num_layers=16)


@pytest.fixture
async def validation() -> AsyncIterator[Validation]:
    validation = Validation(256, MAX_FILE_BYTES)
    yield validation
    await validation.close()


def write_slow(folder: Path, base: BaseModelShape) -> Path:
    """An adapter of zeros, 128 MiB a layer in a sparse file: a third of a second to read each."""
    header: dict[str, object] = {}
    end = 0
    for layer in range(base.num_layers):
        module = base.module_path(layer, "q_proj")
        for factor, shape in (("A", [61, base.hidden_size]), ("B", [64, 61])):
            start, end = end, end + 4 * shape[0] * shape[1]
            header[tensor_name(module, factor)] = {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [start, end],
            }
    files = write(folder, CONFIG | {"r": 61, "target_modules": ["q_proj"]}, encode(header, b""))
    os.truncate(files.weights, files.weights.stat().st_size + end)
    return folder


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return write_slow(tmp_path / "slow", WIDE)


def sandboxes() -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # One that was killed may not have been reaped yet.
            if "admin.uploads.sandbox" in process.cmdline():
                found.append(process)
    return found


async def forks(count: int) -> list[psutil.Process]:
    """The validations that run, once there are so many."""
    async with asyncio.timeout(60):
        while True:
            found = [fork for sandbox in sandboxes() for fork in sandbox.children()]
            if len(found) == count:
                return found
            await asyncio.sleep(0.01)


async def verdict(
    validation: Validation, folder: Path, base: BaseModelShape = BASE, tenant: str = "t"
) -> str:
    try:
        return (await validation.validate(tenant, folder, [base])).digest
    except AdapterRejected as rejected:
        return rejected.code


async def test_the_verdict_is_the_validators_own(validation: Validation, tmp_path: Path) -> None:
    write_adapter(tmp_path / "good")
    files = AdapterFiles.in_folder(tmp_path / "good")
    assert await validation.validate("t", tmp_path / "good", [BASE]) == validate(files, BASE)
    assert read_module_list(tmp_path / "good") == [
        *validate_and_list(files, [BASE], Limits()).modules
    ]
    with pytest.raises(AdapterRejected) as direct:
        validate(AdapterFiles.in_folder(tmp_path), BASE)
    with pytest.raises(AdapterRejected) as apart:
        await validation.validate("t", tmp_path, [BASE])
    assert apart.value.to_dict() == direct.value.to_dict()


async def test_the_whole_corpus_fits_into_its_memory(
    validation: Validation, tmp_path: Path
) -> None:
    """64 MiB of address space beyond the interpreter; what takes more is rejected by another
    code."""
    for name, (weights, code) in WEIGHTS.items():
        write(tmp_path / name, CONFIG, weights)
        assert await verdict(validation, tmp_path / name) == code, name
    for name, (changes, code) in CONFIGS.items():
        config = changes if isinstance(changes, bytes) else CONFIG | changes
        write(tmp_path / name, config, GOOD)
        assert await verdict(validation, tmp_path / name) == code, name


async def test_an_image_over_the_bound_is_rejected(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    small = Validation(256, MAX_FILE_BYTES, 1000)
    assert await verdict(small, tmp_path) == "adapter.image.too_large"
    await small.close()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"memory_bytes": 1 << 20}, "memory"),
        ({"cpu_s": 0.5}, "timeout"),
        ({"wall_s": 0.05}, "timeout"),
    ],
)
async def test_what_takes_too_much_is_rejected_and_the_next_is_not(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    bounds = msgspec.structs.replace(BOUNDS, **changes)
    strict = Validation(256, MAX_FILE_BYTES, bounds=bounds)
    endless = write_slow(tmp_path / "endless", ENDLESS)
    assert await verdict(strict, endless, ENDLESS) == f"adapter.validation.{why}"
    if bounds.wall_s > 1:
        (tmp_path / "bad").mkdir()
        assert await verdict(strict, tmp_path / "bad") == "adapter.file.missing"
    assert [sandbox.children() for sandbox in sandboxes()] == [[]]
    await strict.close()
    assert sandboxes() == []


async def test_a_validation_that_is_killed(validation: Validation, slow: Path) -> None:
    running = asyncio.create_task(verdict(validation, slow, WIDE))
    (fork,) = await forks(1)
    fork.send_signal(signal.SIGSEGV)
    assert await running == "adapter.validation.crashed"
    assert await verdict(validation, slow.parent) == "adapter.file.missing"


async def test_a_sandbox_that_is_killed_is_replaced(validation: Validation, tmp_path: Path) -> None:
    digest = write_adapter(tmp_path)
    for _ in range(3):
        assert await verdict(validation, tmp_path) == digest
        (sandbox,) = sandboxes()
        sandbox.kill()
    running = asyncio.create_task(verdict(validation, tmp_path))
    assert await running == digest


async def test_a_sandbox_that_dies_at_work_does_not_lose_it(
    validation: Validation, slow: Path
) -> None:
    running = asyncio.create_task(verdict(validation, slow, WIDE))
    await forks(1)
    sandboxes()[0].kill()
    assert len(await running) == 64


async def test_few_at_once_and_one_of_each_tenant(validation: Validation, slow: Path) -> None:
    same = [asyncio.create_task(verdict(validation, slow, WIDE, "a")) for _ in range(2)]
    await forks(1)
    await asyncio.sleep(0.3)
    await forks(1)
    others = [asyncio.create_task(verdict(validation, slow, WIDE, t)) for t in ("b", "c")]
    most = 0
    while not all(task.done() for task in (*same, *others)):
        most = max(most, sum(len(sandbox.children()) for sandbox in sandboxes()))
        await asyncio.sleep(0.02)
    assert most == MAX_VALIDATIONS == len(sandboxes())
    assert len({task.result() for task in (*same, *others)}) == 1


@pytest.mark.full
async def test_tenants_take_turns(validation: Validation, slow: Path) -> None:
    """The second upload of a tenant waits behind the first ones of all others."""
    ended: list[str] = []

    async def upload(tenant: str) -> None:
        await verdict(validation, slow, WIDE, tenant)
        ended.append(tenant)

    async with asyncio.TaskGroup() as uploads:
        for tenant in "aaabcd":
            uploads.create_task(upload(tenant))
    assert "".join(ended).rindex("a") == 5
    assert ended.index("a", ended.index("a") + 1) > max(ended.index("b"), ended.index("c"))


async def test_a_cancelled_validation_leaves_no_process(validation: Validation, slow: Path) -> None:
    running = asyncio.create_task(verdict(validation, slow, WIDE))
    (fork,) = await forks(1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    # A background thread ends them.
    async with asyncio.timeout(60):
        while fork.is_running() or sandboxes():
            await asyncio.sleep(0.01)


async def test_a_sandbox_is_told_no_secret(
    validation: Validation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_KEY_PEPPER", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    await verdict(validation, tmp_path)
    (sandbox,) = sandboxes()
    assert "secret" not in sandbox.environ().values()
    assert sandbox.num_fds() == 3


async def test_archives_are_unpacked_there(validation: Validation, tmp_path: Path) -> None:
    digest = write_adapter(tmp_path / "source")
    archive, target = tmp_path / "a.zip", tmp_path / "target"

    def pack(method: int) -> None:
        with zipfile.ZipFile(archive, "w", method) as file:
            for path in (tmp_path / "source").iterdir():
                file.write(path, path.name)

    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        pack(method)
        target.mkdir()
        assert (await validation.validate("t", target, [BASE], archive)).digest == digest
        for path in target.iterdir():
            path.unlink()
        target.rmdir()
    target.mkdir()
    pack(zipfile.ZIP_LZMA)
    with pytest.raises(Invalid, match="neither stored nor deflated"):
        await validation.validate("t", target, [BASE], archive)
    small = Validation(256, 1000)
    pack(zipfile.ZIP_DEFLATED)
    with pytest.raises(TooLarge):
        await small.validate("t", target, [BASE], archive)
    assert list(target.iterdir()) == []
    await small.close()


def test_a_sandbox_ends_with_its_parent(tmp_path: Path) -> None:
    digest = write_adapter(tmp_path)
    script = f"""
import asyncio, pathlib
from admin.uploads.validation import Validation
from tests.adapters.files import BASE
async def main():
    made = await Validation(256, 1 << 30).validate("t", pathlib.Path({str(tmp_path)!r}), [BASE])
    print(made.digest, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip() == digest
        (sandbox,) = psutil.Process(parent.pid).children()
        parent.kill()
    deadline = time.monotonic() + 60
    with suppress(psutil.NoSuchProcess):
        while sandbox.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)
