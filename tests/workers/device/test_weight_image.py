"""Weights that are copied to their own addresses in one piece a part compute what those compute
that were loaded one by one, each layer as soon as it has come."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_swap import swap_rows
from benchmarks.gpu_timing import Bench
from benchmarks.shaped_model import TINY
from ops.base import DeviceEvent, Ops
from ops.reference import ReferenceOps
from ops.registry import select
from tests.doubles import make_model
from tests.ops.conftest import triton_backend
from tests.ops.interpreter import IS_INTERPRETED
from tests.workers.host_virtual_memory import HostVirtualMemory
from tests.workers.paged import PagedModel, Stream
from workers.device.device_memory import AddressRange, MappedMemory
from workers.device.weight_image import WeightImage
from workers.models.loading import LoadedModel, load_model
from workers.models.plan import ModelPlan

EXTENT = 1 << 16
BACKENDS = ["reference", "cpu", *(["triton"] if IS_INTERPRETED else [])]
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="of a GPU"),
]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class LateEvent:
    """Of one copy: what it brings is there when somebody has waited for it."""

    def __init__(self, note: Callable[[LateEvent], None]) -> None:
        self._note = note
        self.is_passed = False

    def synchronize(self) -> None:
        self.wait()

    def query(self) -> bool:
        return self.is_passed

    def wait(self) -> None:
        self.is_passed = True
        self._note(self)


class LateOps:
    """A backend whose events are late, and which notes what it does and what is waited for."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.log: list[str] = []
        self.events: list[LateEvent] = []
        self.there: list[Tensor] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)

    def linear(self, x: Tensor, weight: object) -> Tensor:
        self.log.append("linear")
        return self._ops.linear(x, weight)  # pyright: ignore

    def record_event(self) -> DeviceEvent:
        self.events.append(LateEvent(self._arrive))
        return self.events[-1]

    def hold_back(self, home: Home) -> None:
        """The parts that were copied are not there yet."""
        self.there = [home.addresses.tensor[part] for part in home.image.parts]
        self._late = [part.clone() for part in self.there]
        home.addresses.tensor.fill_(0xFF)

    def _arrive(self, event: LateEvent) -> None:
        part = self.events.index(event)
        self.there[part].copy_(self._late[part])
        self.log.append(f"part {part}")


class PinningMemory(HostVirtualMemory):
    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[tuple[int, int]] = []

    def pin(self, tensor: Tensor) -> None:
        self.pinned.append((tensor.data_ptr(), tensor.nbytes))


class Home:
    """A tiny model's range, where two models would fit, and its image."""

    def __init__(self, folder: Path, ops: Ops, family: str = "gemma3_text") -> None:
        self.plan = ModelPlan.read(make_model(folder, family), "tiny", torch.float32)
        num_extents = -(-self.plan.max_bytes(select("cpu")) // EXTENT)
        self.virtual = PinningMemory()
        self.memory = MappedMemory(self.virtual, 2 * num_extents, EXTENT)
        for extent in range(2 * num_extents):
            self.memory.lend(extent)
        self.addresses: AddressRange = self.memory.reserve(num_extents)
        self.image = WeightImage(self.addresses, ops)
        self.model = load_model(self.plan, ops, image=self.image)


def logits(model: LoadedModel, ops: Ops) -> Tensor:
    return PagedModel(model, ops).step([(Stream(), PROMPT)])[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["qwen2", "llama"])
@torch.inference_mode()
def test_weights_from_the_image_are_the_weights(tmp_path: Path, backend: str, family: str) -> None:
    """Each time, whatever was at their addresses or in their memory meanwhile; the head of its own
    or tied to the embedding."""
    ops = triton_backend() if backend == "triton" else select(backend)
    home = Home(tmp_path, ops, family)
    plain = load_model(home.plan, ops)
    expected = logits(plain, ops)
    other = home.memory.reserve(len(home.addresses.tensor) // EXTENT)
    for _ in range(3):
        home.image.bring()
        assert torch.equal(logits(home.model, ops), expected)
        home.image.leave()
        other.back()
        other.tensor.fill_(0xFF)
        other.unback()
    assert home.model.num_bytes == plain.num_bytes


@torch.inference_mode()
def test_a_layer_waits_for_its_own_weights_and_no_later_ones(tmp_path: Path) -> None:
    late = LateOps(ReferenceOps())
    home = Home(tmp_path, late)  # pyright: ignore
    expected = logits(load_model(home.plan, ReferenceOps()), ReferenceOps())
    home.image.bring()
    late.hold_back(home)
    assert not home.image.arrival.is_complete
    assert torch.equal(logits(home.model, late), expected)  # pyright: ignore
    num_layers = home.plan.spec.num_layers
    linears = ["linear"] * 4
    wanted = ["part 0"]
    for layer in range(num_layers):
        wanted += [f"part {layer + 1}", *linears]
    assert late.log == [*wanted, f"part {num_layers + 1}", "linear"]
    assert home.image.arrival.is_complete
    assert torch.equal(logits(home.model, late), expected)  # pyright: ignore
    assert late.log.count("part 0") == 1, "what is there is not waited for"


@torch.inference_mode()
def test_it_leaves_when_its_copy_has_ended(tmp_path: Path) -> None:
    late = LateOps(ReferenceOps())
    home = Home(tmp_path, late)  # pyright: ignore
    home.image.bring()
    late.hold_back(home)
    home.image.leave()
    assert late.events[-1].is_passed
    home.image.bring()


def test_every_part_is_pinned_once_in_pages_of_its_own(tmp_path: Path) -> None:
    home = Home(tmp_path, ReferenceOps())
    assert len(home.image.parts) == home.plan.spec.num_layers + 2
    first, _ = home.virtual.pinned[0]
    parts = [(address - first, size) for address, size in home.virtual.pinned]
    assert parts == [(part.start, part.stop - part.start) for part in home.image.parts]
    assert all(edge % mmap.PAGESIZE == 0 for edge in [first, *sum(parts, ())])


@torch.inference_mode()
@pytest.mark.parametrize("name", ["reference", pytest.param("cuda", marks=NEEDS_GPU)])
def test_a_captured_step_computes_the_same_when_its_model_is_back(name: str) -> None:
    ops = select(name)
    bench = Bench(ops.device, tiny=True)
    bench.results["transfer_bytes_per_second"] = 1e9
    (row,) = swap_rows(bench, ops, TINY)
    assert row["same"]


def test_weights_that_are_larger_than_their_addresses_are_refused(tmp_path: Path) -> None:
    home = Home(tmp_path, ReferenceOps())
    small = WeightImage(home.memory.reserve(1), ReferenceOps())
    with pytest.raises(MemoryError, match="more than 65536 bytes"):
        load_model(home.plan, ReferenceOps(), image=small)
