"""Only the runner of a model writes to the device buffers that its steps read, and nobody waits for
the device with the memory lock held."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.base import AdapterTables, StreamName
from ops.cpu import CpuOps
from tests.workers import watched_lock
from tests.workers.process.test_worker import Setup, assert_batched_equals_alone
from workers.execution.batch import ModelBuffers
from workers.execution.model_runner import ModelRunner
from workers.process import model_builder

ADDRESSES = {"data_ptr", "numpy", "untyped_storage"}
"""Who has one can write without torch."""
WAITS = {"cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__"}

_writer = threading.local()


class DeviceBuffer(Tensor):
    """Memory that refuses who is no writer, and notes who waits for its values under the lock."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        if name in WAITS and watched_lock.is_held():
            watched_lock.note(f"a wait for the device: {name}")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        is_write = (writes and isinstance(args[0], cls)) or name in ADDRESSES
        if is_write and not getattr(_writer, "is_here", False):
            watched_lock.note(f"{name} outside of the runner")
            raise PermissionError(name)
        return super().__torch_function__(func, types, args, kwargs or {})


@contextmanager
def writer() -> Iterator[None]:
    before = getattr(_writer, "is_here", False)
    _writer.is_here = True
    try:
        yield
    finally:
        _writer.is_here = before


def guarded(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(DeviceBuffer)


@pytest.fixture
def refusing_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On which writers are the runner and, for the arena alone, copies on a side stream."""

    def buffers(arena: Tensor, tokens: Tensor, tables: AdapterTables) -> ModelBuffers:
        a_offset, b_offset = guarded(tables.a_offset), guarded(tables.b_offset)
        entries = AdapterTables(a_offset, b_offset, guarded(tables.rank))
        return ModelBuffers(guarded(arena), guarded(tokens), entries)

    launch: Callable[..., Any] = ModelRunner.launch

    def guarded_launch(*arguments: Any, **options: Any) -> Any:
        with writer():
            return launch(*arguments, **options)

    @contextmanager
    def side_stream(ops: CpuOps, name: StreamName) -> Iterator[None]:
        assert name == "adapters" and not watched_lock.is_held()
        with writer():
            yield

    monkeypatch.setattr(model_builder, "ModelBuffers", buffers)
    monkeypatch.setattr(ModelRunner, "launch", guarded_launch)
    monkeypatch.setattr(CpuOps, "side_stream", side_stream)


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["in-turn", "ahead"])
def test_only_the_runner_writes(tmp_path: Path, refusing_device: None, runs_ahead: bool) -> None:
    """Adapters replace each other, sequences are preempted, and what is computed is right."""
    llama = Setup(tmp_path, "llama")
    config = llama.config(ops="cpu", memory=12 << 16, max_loaded_adapters=3, runs_ahead=runs_ahead)
    assert_batched_equals_alone(llama, config)


def test_the_double_refuses_a_write_and_notes_a_wait() -> None:
    buffer = guarded(torch.zeros(4))
    attempts: list[Callable[[], object]] = [buffer.zero_, buffer[1:].data_ptr, buffer.numpy]
    for attempt in attempts:
        with pytest.raises(PermissionError):
            attempt()
    with writer():
        buffer[2] = 1
    with watched_lock.WatchedLock():
        assert buffer.tolist() == [0, 0, 1, 0]
    noted = [note.splitlines()[0] for note in watched_lock.violations]
    assert noted[:2] == ["zero_ outside of the runner", "data_ptr outside of the runner"]
    assert noted[-1] == "a wait for the device: tolist"
    watched_lock.violations.clear()
