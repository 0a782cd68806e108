"""A model's weights as they go to the device: packed, in the order in which it needs them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from ops.base import DeviceEvent, Ops
from workers.device.device_memory import AddressRange

ALIGNMENT = 256
"""Alignment of each tensor, in bytes, as allocators on a GPU have it."""


class Arrival:
    """How far weights have come that are computed with before all are there. Their parts are the
    embedding, each layer, and the head."""

    def __init__(self) -> None:
        self._events: Sequence[DeviceEvent] = ()

    def begin(self, events: Sequence[DeviceEvent]) -> None:
        """events: the end of each part's copy."""
        self._events = events

    @property
    def is_complete(self) -> bool:
        """Nothing has to wait any more."""
        if self._events and self._events[-1].query():
            self._events = ()
        return not self._events

    def wait(self, part: int) -> None:
        """What the thread submits from now on is computed when the part is there."""
        if self._events:
            self._events[part].wait()

    def synchronize(self) -> None:
        """Returns when all is there."""
        if self._events:
            self._events[-1].synchronize()
        self._events = ()


class WeightImage:
    """The packed weights on the host, and the addresses that they have whenever they are on the
    device. Made once, on any thread; then used on the engine's."""

    def __init__(self, addresses: AddressRange, ops: Ops) -> None:
        self.arrival = Arrival()
        self._addresses = addresses
        self._ops = ops
        self._host = torch.empty(0, dtype=torch.uint8)
        self._end = 0
        self.parts: list[slice] = []
        """Bytes that are computed with together, in the order in which they are needed."""

    def begin(self) -> None:
        """An empty one."""
        # As much as there are addresses; what is never written takes no memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pages = mmap.mmap(-1, len(self._addresses.tensor), flags=flags)
        self._host = torch.frombuffer(pages, dtype=torch.uint8)
        self._end = 0
        self.parts = []

    def drop(self) -> Tensor:
        """Forgets the weights. Returns what keeps them in memory."""
        host, self._host = self._host, torch.empty(0, dtype=torch.uint8)
        return host

    def place(self, tensor: Tensor) -> Tensor:
        """Copies a tensor of the host into the image. Returns where it will be on the device.
        Raises MemoryError if the addresses are too few."""
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        place = slice(start, start + tensor.nbytes)
        if place.stop > len(self._host):
            raise MemoryError(f"the packed weights take more than {len(self._host)} bytes")
        self._host[place].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._end = place.stop
        return self._addresses.tensor[place].view(tensor.dtype).view(tensor.shape)

    def end_part(self) -> None:
        """It is all that was placed since the last one. Pinned by itself: while it is, others may
        wait for the driver."""
        self._end = -(-self._end // mmap.PAGESIZE) * mmap.PAGESIZE
        part = slice(self.parts[-1].stop if self.parts else 0, self._end)
        if part.start < part.stop:
            self._addresses.virtual.pin(self._host[part])
        self.parts.append(part)

    def bring(self) -> None:
        """Has it copied to the device, beside the steps in flight. There is spare memory for it."""
        self._addresses.back()
        try:
            self.arrival.begin(self._copy())
        except Exception:
            self._addresses.unback()
            raise

    def _copy(self) -> list[DeviceEvent]:
        events: list[DeviceEvent] = []
        with self._ops.side_stream("weights", waits=False):
            for part in self.parts:
                self._addresses.tensor[part].copy_(self._host[part], non_blocking=True)
                events.append(self._ops.record_event())
        return events

    def leave(self) -> None:
        """Its memory is spare then. No step that uses it may be in flight."""
        self.arrival.synchronize()
        self._addresses.unback()
