"""What is lent to weights goes back to the system, and nothing else does; where weights have
addresses of their own, the memory of their extents goes there."""

from __future__ import annotations

import gc
import mmap
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memory.arena import Arena
from memory.errors import IntegrityError
from memory.eviction.adapter_memory import AdapterMemory
from memory.eviction.broker import MemoryBroker
from tests.workers.driver_double import INVALID_VALUE, DriverDouble
from tests.workers.host_virtual_memory import HostVirtualMemory
from workers.base_models.loader import resident_bytes
from workers.device.cuda_memory import CudaVirtualMemory, _free
from workers.device.device_memory import HostMemory, MappedMemory
from workers.device.virtual_memory import VirtualMemory
from workers.device.weight_memory import WeightMemory

EXTENT = 1 << 21
"""A granule of every device."""

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="of a GPU")
linux = pytest.mark.skipif(sys.platform != "linux", reason="of Linux")


def on_gpu() -> VirtualMemory:
    return CudaVirtualMemory.of(torch.device("cuda"))


MAKERS = [
    pytest.param(HostVirtualMemory, id="host", marks=linux),
    pytest.param(DriverDouble.make, id="driver-double", marks=linux),
    pytest.param(on_gpu, id="cuda", marks=[pytest.mark.gpu, needs_gpu]),
]


@linux
def test_extents_lent_are_not_resident_and_others_stay() -> None:
    memory = HostMemory(32, EXTENT)
    memory.tensor.fill_(7)
    before = resident_bytes()
    lent = [*range(4, 20), 25]
    for extent in lent:
        memory.lend(extent)
    assert before - resident_bytes() > 12 * EXTENT
    kept = torch.ones(32, dtype=torch.bool)
    kept[lent] = False
    by_extent = memory.tensor.view(33, EXTENT)[1:]
    assert bool((by_extent[kept] == 7).all())
    assert not by_extent[~kept].any(), "whoever writes there again begins with new memory"


@linux
def test_more_weights_beside_the_arena_than_the_machine_has_memory_are_refused() -> None:
    memory = HostMemory(2, EXTENT)
    memory.extend(1)
    with pytest.raises(MemoryError, match=r"this machine has \d+\.\d\d [MG]iB"):
        memory.extend(1 << 30)


class Mapped:
    """Six extents, and the ranges of two models."""

    def __init__(self, virtual: VirtualMemory) -> None:
        assert EXTENT % virtual.granularity == 0
        self.memory = MappedMemory(virtual, 6, EXTENT)
        self.arena = Arena(6 * EXTENT, EXTENT)
        broker = MemoryBroker(self.arena, AdapterMemory(self.arena))
        self.weights = WeightMemory(self.arena, broker, self.memory)
        self.extents = self.memory.tensor.view(7, EXTENT)[1:]
        self.two, self.three = self.memory.reserve(2), self.memory.reserve(3)


@pytest.fixture(params=MAKERS)
def mapped(request: pytest.FixtureRequest) -> Mapped:
    make: Callable[[], VirtualMemory] = request.param
    return Mapped(make())


def test_a_model_has_the_same_addresses_each_time(mapped: Mapped) -> None:
    """And what the arena keeps meanwhile stays as it is."""
    mapped.memory.tensor.fill_(1)
    addresses = mapped.two.tensor.data_ptr()
    for value in (2, 3):
        mapped.weights.allocate("two", 2)
        mapped.two.back()
        mapped.two.tensor.fill_(value)
        assert bool((mapped.two.tensor == value).all())
        assert bool((mapped.extents[2:] == 1).all())
        mapped.two.unback()
        mapped.weights.free("two")
        mapped.extents[:2].fill_(1)
        assert bool((mapped.memory.tensor == 1).all())
    assert mapped.two.tensor.data_ptr() == addresses


def test_models_take_turns_with_the_memory_of_their_extents(mapped: Mapped) -> None:
    mapped.weights.allocate("two", 2)
    mapped.weights.allocate("three", 3)
    mapped.two.back()
    mapped.three.back()
    mapped.two.tensor.fill_(2)
    mapped.three.tensor.fill_(3)
    mapped.extents[5].fill_(5)
    assert bool((mapped.two.tensor == 2).all() and (mapped.three.tensor == 3).all())
    with pytest.raises(IntegrityError, match="lies somewhere"):
        mapped.memory.reserve(1).back()


def test_nothing_has_memory_twice(mapped: Mapped) -> None:
    with pytest.raises(IntegrityError, match="lies somewhere"):
        mapped.two.back()
    mapped.weights.allocate("half", 1)
    with pytest.raises(IntegrityError, match="lies somewhere"):
        mapped.two.back()
    mapped.weights.free("half")
    mapped.memory.tensor.fill_(4)
    assert bool((mapped.memory.tensor == 4).all()), "what was begun was given back"
    with pytest.raises(IntegrityError, match="has memory"):
        mapped.memory.restore(0)


@pytest.mark.full
@linux
@pytest.mark.parametrize("place", ["extents[0]", "two.tensor"])
def test_what_has_no_memory_cannot_be_written(place: str) -> None:
    """An extent of weights, and a model that is not there."""
    code = (
        "from tests.workers.device.test_device_memory import *\n"
        "mapped = Mapped(HostVirtualMemory())\n"
        "mapped.extents[0].fill_(1)\n"
        "mapped.weights.allocate('two', 2)\n"
        "mapped.two.back(); mapped.two.tensor.fill_(1); mapped.two.unback()\n"
        f"print('now', flush=True); mapped.{place}[0] = 1\n"
    )
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[3]
    ended = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=False)
    assert (ended.stdout, ended.returncode) == (b"now\n", -signal.SIGSEGV)


@linux
def test_addresses_live_as_long_as_a_tensor_views_them() -> None:
    mapped = Mapped(HostVirtualMemory())
    part = mapped.extents[3:5]
    part.fill_(9)
    before = num_mappings()
    del mapped
    gc.collect()
    assert bool((part == 9).all())
    del part
    gc.collect()
    assert num_mappings() < before


def num_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


@linux
def test_the_driver_is_given_back_what_it_gave() -> None:
    library = DriverDouble()
    mapped = Mapped(library.virtual_memory())
    mapped.weights.allocate("two", 2)
    mapped.two.back()
    del mapped
    gc.collect()
    assert not library.reserved and not library.mapped and not library.pieces


@linux
def test_access_is_asked_for_once_a_range() -> None:
    """Each call of the driver costs a swap the same, however long its range is."""
    library = DriverDouble()
    mapped = Mapped(library.virtual_memory())
    before = library.num_access_calls
    mapped.weights.allocate("three", 3)
    mapped.three.back()
    assert library.num_access_calls == before + 1
    mapped.three.tensor.fill_(3)


@linux
@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess"])
def test_a_range_that_cannot_be_mapped_whole_is_not_mapped(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = DriverDouble()
    virtual = library.virtual_memory()
    addresses = virtual.reserve(2 * EXTENT)
    pieces = [virtual.create(EXTENT), 12345 if call == "cuMemMap" else virtual.create(EXTENT)]
    if call == "cuMemSetAccess":
        monkeypatch.setitem(library._functions, call, lambda *_: INVALID_VALUE)
    with pytest.raises(OSError, match=f"{call}: CUDA_ERROR_INVALID_VALUE"):
        virtual.map(addresses.data_ptr(), pieces, EXTENT)
    assert not library.mapped


@linux
def test_a_range_of_the_host_that_cannot_be_mapped_whole_is_not_mapped() -> None:
    virtual = HostVirtualMemory()
    addresses = virtual.reserve(2 * EXTENT)
    # An assertion must not show the tensor, whose addresses have no memory.
    start = addresses.data_ptr()
    with pytest.raises(OSError, match="Invalid argument"):
        virtual.map(start, [virtual.create(EXTENT), 1], EXTENT)
    assert access_at(start) == "---p"
    virtual.map(start, [virtual.create(EXTENT)] * 2, EXTENT)
    assert access_at(start) == "rw-s"


def access_at(address: int) -> str:
    """The access that this process has to the memory at the address, as the kernel says it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_ = line.split()
        start, stop = (int(end, 16) for end in span.split("-"))
        if start <= address < stop:
            return access
    raise LookupError(hex(address))


@linux
def test_addresses_that_cannot_be_reserved_leave_no_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    library = DriverDouble()
    virtual = library.virtual_memory()
    monkeypatch.setitem(library._functions, "cuMemMap", lambda *_: INVALID_VALUE)
    with pytest.raises(OSError, match="cuMemMap: CUDA_ERROR_INVALID_VALUE"):
        virtual.reserve(EXTENT)
    assert not library.pieces


@linux
def test_pinned_memory_is_let_go_with_its_tensor() -> None:
    library = DriverDouble()
    virtual = library.virtual_memory()
    tensor = torch.frombuffer(mmap.mmap(-1, 4 * mmap.PAGESIZE), dtype=torch.uint8)
    virtual.pin(tensor[: mmap.PAGESIZE])
    virtual.pin(tensor[mmap.PAGESIZE :])
    with pytest.raises(OSError, match="ALREADY_REGISTERED"):
        virtual.pin(tensor)
    assert len(library.pinned) == 2
    del tensor
    gc.collect()
    assert not library.pinned


def test_what_the_driver_refuses_is_raised_by_its_name() -> None:
    library = DriverDouble(num_pieces=1)
    virtual = library.virtual_memory()
    piece = virtual.create(EXTENT)
    with pytest.raises(MemoryError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        virtual.create(EXTENT)
    with pytest.raises(OSError, match="cuMemMap: CUDA_ERROR_INVALID_VALUE"):
        virtual.map(EXTENT, [piece], EXTENT)


def test_a_range_may_be_freed_while_another_thread_maps_pieces() -> None:
    """As a collector frees it: on any thread, at any time. Here, the other thread maps a piece
    whenever two addresses are compared."""

    class Address(int):
        def __ge__(self, other: int) -> bool:
            mapped[Address(len(mapped))] = 1
            return int(self) >= other

        __hash__ = int.__hash__

    class Driver:
        def call(self, name: str, *_: object) -> None:
            calls.append(name)

    calls: list[str] = []
    mapped: dict[int, int] = {Address(start): 1 for start in range(10)}
    _free(Driver(), mapped, 4, 2)  # pyright: ignore
    assert calls == ["cuCtxSynchronize", *["cuMemUnmap"] * 2, "cuMemAddressFree"]
    assert 4 not in mapped and 5 not in mapped and len(mapped) > 8
