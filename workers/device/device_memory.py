"""Memory of the arena's extents. While weights own an extent, the extent's memory is made available
to weights (on a GPU) or released to the OS (on a CPU)."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from memory.errors import require
from workers.device.virtual_memory import VirtualMemory


class DeviceMemory(Protocol):
    """Memory of the arena's extents, preceded by one extent that is not part of the arena.

    Kernels receive the start address of the whole memory, and Triton refuses an address that is not
    mapped. Therefore the first extent is never lent to weights. The first extent also has the KV
    page of padding tokens.

    tensor: uint8 tensor of all extents, one after the other.
    """

    tensor: Tensor

    def lend(self, extent: int) -> None:
        """Makes the extent's memory available to weights. Called when weights have become the
        owner of the extent. The extent must no longer be in use, and its contents are lost. Weights
        are not stored at the addresses of the extent."""
        ...

    def restore(self, extent: int) -> None:
        """Makes the extent's memory usable again, with arbitrary contents. Called before the
        extent's owner, the weights of a model, frees the extent."""
        ...

    def reserve(self, num_extents: int) -> AddressRange | None:
        """Reserves addresses for a model's weights. Returns None on a CPU worker, where torch
        allocates the weights."""
        ...

    def extend(self, num_extents: int) -> None:
        """Provides memory for `num_extents` more extents, which are outside the arena and can hold
        only weights. Raises MemoryError, naming the available memory, if there is too little."""
        ...


class HostMemory:
    """Memory of a CPU worker. Weights are ordinary allocations outside the extents. The pages of an
    extent that is lent to weights are released to the OS, so that the weights do not increase the
    worker's memory use."""

    def __init__(self, num_extents: int, extent_bytes: int) -> None:
        """num_extents: number of the arena's extents. extent_bytes: a multiple of the page size."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._pages = mmap.mmap(-1, (1 + num_extents) * extent_bytes, flags=flags)
        self._extent_bytes = extent_bytes
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)

    def lend(self, extent: int) -> None:
        size = self._extent_bytes
        self._pages.madvise(mmap.MADV_DONTNEED, (1 + extent) * size, size)

    def restore(self, extent: int) -> None:
        """Does nothing, because the OS maps pages again when they are first written."""

    def reserve(self, num_extents: int) -> None:
        return None

    def extend(self, num_extents: int) -> None:
        """Checks that enough memory is available. torch allocates the memory when weights are
        loaded."""
        available = available_bytes()
        if num_extents * self._extent_bytes > available:
            raise MemoryError(f"this machine has {gib(available)}")


class MappedMemory:
    """Memory of a GPU worker. It is allocated in pieces, each as large as an extent. Each piece is
    mapped to an extent of the arena, mapped into the address range of a model's weights, or spare
    (not mapped). No piece is mapped to an extent that is lent to weights, so access to this extent
    faults."""

    def __init__(self, virtual: VirtualMemory, num_extents: int, extent_bytes: int) -> None:
        """num_extents: number of the arena's extents. extent_bytes: a multiple of the virtual
        memory's granularity. Raises MemoryError if the device has too little memory."""
        self._virtual = virtual
        self._extent_bytes = extent_bytes
        self._spare = [virtual.create(extent_bytes) for _ in range(1 + num_extents)]
        self._addresses = self.reserve(1 + num_extents)
        self._addresses.back()
        self.tensor = self._addresses.tensor

    def lend(self, extent: int) -> None:
        self._addresses.unback_part(1 + extent)

    def restore(self, extent: int) -> None:
        self._addresses.back_part(1 + extent)

    def extend(self, num_extents: int) -> None:
        pieces: list[int] = []
        try:
            for _ in range(num_extents):
                pieces.append(self._virtual.create(self._extent_bytes))
        except (MemoryError, OSError) as error:
            for piece in pieces:
                self._virtual.release(piece)
            num_bytes = len(pieces) * self._extent_bytes
            raise MemoryError(f"the device has {gib(num_bytes)}") from error
        # New pieces go to the front, because another thread may be mapping pieces from the end.
        self._spare[:0] = pieces

    def reserve(self, num_extents: int) -> AddressRange:
        """Reserves addresses for `num_extents` pieces, to which no memory is mapped yet."""
        return AddressRange(self._virtual, num_extents, self._extent_bytes, self._spare)


def available_bytes() -> int:
    """Returns the bytes of host memory that are available without swapping. If the process has a
    cgroup v2 memory limit, returns at most the bytes left within the limit."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        return min(available, max(limit - int((group / "memory.current").read_text()), 0))
    except (OSError, ValueError):  # There is no cgroup v2, or the cgroup has no limit.
        return available


def gib(num_bytes: int) -> str:
    """Formats a number of bytes, such as `1.25 GiB`."""
    unit, size = ("GiB", 1 << 30) if num_bytes >= 1 << 30 else ("MiB", 1 << 20)
    return f"{num_bytes / size:.2f} {unit}"


class AddressRange:
    """Range of reserved addresses, which stay valid whether or not memory is mapped to them. Newly
    mapped memory has undefined contents.

    tensor: uint8 tensor of the whole range.
    """

    def __init__(
        self, virtual: VirtualMemory, num_parts: int, part_bytes: int, spare: list[int]
    ) -> None:
        """spare: list of unmapped pieces, which the range shares with the `MappedMemory` that
        created it."""
        self.tensor = virtual.reserve(num_parts * part_bytes)
        self.virtual = virtual
        self._num_parts = num_parts
        self._part_bytes = part_bytes
        self._spare = spare
        self._pieces: dict[int, int] = {}
        """Piece that is mapped to each part of the range, by the part's index."""

    def back(self) -> None:
        """Maps spare pieces to the whole range. If this fails, no piece is mapped."""
        self._back(range(self._num_parts))

    def unback(self) -> None:
        """Unmaps all pieces and adds them to the spare pieces. The device must no longer use the
        range."""
        for part in list(self._pieces):
            self.unback_part(part)

    def back_part(self, part: int) -> None:
        self._back(range(part, part + 1))

    def _back(self, parts: range) -> None:
        for part in parts:
            require(part not in self._pieces, f"part {part} has memory already")
        require(len(self._spare) >= len(parts), "all memory lies somewhere")
        pieces = self._spare[len(self._spare) - len(parts) :]
        self.virtual.map(self._address(parts.start), pieces, self._part_bytes)
        del self._spare[len(self._spare) - len(parts) :]
        self._pieces.update(zip(parts, pieces, strict=True))

    def unback_part(self, part: int) -> None:
        require(part in self._pieces, f"part {part} has no memory")
        self.virtual.unmap(self._address(part), self._part_bytes)
        self._spare.append(self._pieces.pop(part))

    def _address(self, part: int) -> int:
        return self.tensor.data_ptr() + part * self._part_bytes
