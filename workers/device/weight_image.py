"""Packed weights of a model in host memory, in the order in which a forward pass needs them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from ops.base import DeviceEvent, Ops
from workers.device.device_memory import AddressRange

ALIGNMENT = 256
"""Alignment of each tensor in bytes. GPU allocators use the same alignment."""


class Arrival:
    """Progress of a copy of weights to the device. Computation can start before the whole copy is
    done, because it waits for one part at a time. The parts are the embedding, each layer, and the
    head."""

    def __init__(self) -> None:
        self._events: Sequence[DeviceEvent] = ()

    def begin(self, events: Sequence[DeviceEvent]) -> None:
        """Starts tracking a copy. events: one event per part, which is recorded after the part's
        copy."""
        self._events = events

    @property
    def is_complete(self) -> bool:
        """Whether the whole copy is done."""
        if self._events and self._events[-1].query():
            self._events = ()
        return not self._events

    def wait(self, part: int) -> None:
        """Makes the thread's current device stream wait for the copy of the part. Work that the
        thread submits later runs after the copy. Does not block the thread."""
        if self._events:
            self._events[part].wait()

    def synchronize(self) -> None:
        """Blocks until the whole copy is done."""
        if self._events:
            self._events[-1].synchronize()
        self._events = ()


class WeightImage:
    """Packed weights on the host, and their fixed addresses on the device. While the model is being
    loaded, a loading thread uses the image. At other times, the engine thread uses it."""

    def __init__(self, addresses: AddressRange, ops: Ops) -> None:
        self.arrival = Arrival()
        self._addresses = addresses
        self._ops = ops
        self._host = torch.empty(0, dtype=torch.uint8)
        self._end = 0
        self.parts: list[slice] = []
        """Byte ranges of the parts, in the order in which a forward pass needs the parts."""

    def begin(self) -> None:
        """Empties the image and allocates its host memory. Called before each load."""
        # The image is as large as the address range. Pages that are never written take no memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pages = mmap.mmap(-1, len(self._addresses.tensor), flags=flags)
        self._host = torch.frombuffer(pages, dtype=torch.uint8)
        self._end = 0
        self.parts = []

    def drop(self) -> Tensor:
        """Removes the weights from the image. Returns a tensor that owns the weights' host memory.
        The memory is freed together with this tensor."""
        host, self._host = self._host, torch.empty(0, dtype=torch.uint8)
        return host

    def place(self, tensor: Tensor) -> Tensor:
        """Copies a host tensor into the image on the host. Returns a view of the device addresses
        to which it will be copied later. Raises MemoryError if the image has no room for it."""
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        place = slice(start, start + tensor.nbytes)
        if place.stop > len(self._host):
            raise MemoryError(f"the packed weights take more than {len(self._host)} bytes")
        self._host[place].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._end = place.stop
        return self._addresses.tensor[place].view(tensor.dtype).view(tensor.shape)

    def end_part(self) -> None:
        """Ends the current part, which has all tensors placed since the last call, and pins its
        pages. Parts are pinned one by one, because other driver calls may wait while pages are
        pinned."""
        self._end = -(-self._end // mmap.PAGESIZE) * mmap.PAGESIZE
        part = slice(self.parts[-1].stop if self.parts else 0, self._end)
        if part.start < part.stop:
            self._addresses.virtual.pin(self._host[part])
        self.parts.append(part)

    def bring(self) -> None:
        """Maps memory to the device addresses and starts the copy of the weights to the device. The
        copy runs concurrently with the steps in flight. There must be enough spare memory."""
        self._addresses.back()
        try:
            self.arrival.begin(self._copy())
        except Exception:
            self._addresses.unback()
            raise

    def _copy(self) -> list[DeviceEvent]:
        events: list[DeviceEvent] = []
        with self._ops.side_stream("weights"):
            for part in self.parts:
                self._addresses.tensor[part].copy_(self._host[part], non_blocking=True)
                events.append(self._ops.record_event())
        return events

    def leave(self) -> None:
        """Unmaps the device memory of the weights and adds it to the spare memory. First waits for
        a copy in progress. No step in flight may use the weights."""
        self.arrival.synchronize()
        self._addresses.unback()
