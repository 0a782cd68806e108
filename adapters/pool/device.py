"""Places adapters of one base model on the device, and orders the entries of its tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adapters.pool.packed_image import AdapterImage, ImageTables
from adapters.pool.tiers import AdapterEntry
from memory.accounts import Ask, Holdings, Tenant
from memory.errors import require
from memory.eviction.adapter_memory import AdapterMemory, Placement
from memory.eviction.broker import MemoryBroker
from ops.base import DeviceEvent, Ops
from ops.commands import ClearSlot, PendingCommands, TableRows, WriteSlot

RETRY_S = 0.25
"""Seconds after which an adapter for which there was no room is tried again in any case."""


class DeviceTier:
    """Adapters on the device. Owns `AdapterEntry.slot` and `AdapterEntry.placement`, which no other
    class sets. An adapter has both or neither.

    Evicts from the tenant that holds the most bytes relative to the tenant's weight. Evicts the
    tenant's adapter with the lowest product of reload time per byte and expected reuse.
    """

    def __init__(
        self,
        memory: Tensor,
        placements: AdapterMemory,
        broker: MemoryBroker,
        *,
        ops: Ops,
        commands: PendingCommands,
        copies: dict[int, DeviceEvent],
        table_shape: tuple[int, int],
        num_slots: int,
        clock: Callable[[], float],
    ) -> None:
        """memory: uint8 tensor on the device. placements: allocator of parts of `memory`. broker:
        evicts items from `memory`. The caller must add the tier to the broker. commands: get a
        command for each slot that an adapter gets or loses. copies: get the end of each copy, by
        slot. table_shape: rows and columns of an image's tables (see `ImageTables`)."""
        self._memory = memory
        self.placements = placements
        self._broker = broker
        self._ops = ops
        self.commands = commands
        self._copies = copies
        self._table_shape = table_shape
        self._clock = clock
        self.num_slots = num_slots
        self._free_slots = list(reversed(range(num_slots)))
        self.resident: dict[Placement, AdapterEntry] = {}
        self._refused: dict[str, int] = {}
        """Smallest size for which there was no room, in bytes, by account. Images of this size are
        refused without another scan of all idle items until `poll` clears the dict."""
        self._levels: tuple[int, ...] = ()
        self.is_here = True
        """Whether the base model is on the device. If not, no adapters are loaded to the device."""
        self.num_evictions = 0

    @property
    def share_bytes(self) -> int:
        """Bytes of adapter memory per base model, if the memory is divided equally."""
        return self.placements.capacity_bytes // len(self._broker.holders)

    def poll(self) -> None:
        """Allows failed allocations to be tried again once memory or slots have become free or
        idle. Allows it after `RETRY_S` in any case, because what may be evicted also depends on the
        accounts."""
        if self._refused:
            before, self._levels = self._levels, self._read_levels()
            if any(old < new for old, new in zip(before, self._levels, strict=True)):
                self._refused.clear()

    def place(self, entry: AdapterEntry, image: AdapterImage) -> Callable[[], AdapterImage] | None:
        """Allocates memory and a table slot for the image, evicting idle adapters and KV pages.
        Returns a function that copies the image there, or None if there is no room."""
        account, num_bytes, num_before = entry.account, image.num_bytes, self._broker.num_evictions
        if num_bytes >= self._refused.get(account, num_bytes + 1):
            return None
        is_first = self._is_first(account)
        if not self._free_slots and not self._free_slot(account, is_first=is_first):
            self._refuse(account, 0)
            return None
        ends = image.tables.factor_ends(num_bytes)
        placement = self._broker.allocate_adapter(ends, account, is_first=is_first)
        if placement is None:
            self._refuse(account, num_bytes)
            return None
        entry.load_times.num_evicted = self._broker.num_evictions - num_before
        slot = self._free_slots.pop()
        entry.placement, entry.slot = placement, slot
        self.resident[placement] = entry

        def copy() -> AdapterImage:
            payload = torch.from_numpy(image.payload)
            with self._ops.side_stream("adapters"):
                for offset, start, stop in placement.pieces:
                    target = self._memory[offset : offset + stop - start]
                    target.copy_(payload[start:stop], non_blocking=True)
                event = self._copies[slot] = self._ops.record_event()
            # Steps would wait if they used the adapter earlier.
            event.synchronize()
            return image

        return copy

    def _refuse(self, account: str, num_bytes: int) -> None:
        if not self._refused:
            self._levels = self._read_levels()
        self._refused[account] = num_bytes

    def _read_levels(self) -> tuple[int, ...]:
        """Returns the time in `RETRY_S`, and amounts of slots and memory that are free or idle."""
        num_idle = sum(each.is_idle and not each.is_awaited for each in self.resident.values())
        periods = int(self._clock() / RETRY_S)
        return periods, len(self._free_slots), num_idle, *self._broker.levels()

    def serve(self, entry: AdapterEntry, image: AdapterImage) -> None:
        """Makes the next step write the tables of an adapter whose image has been copied."""
        assert entry.slot is not None and entry.placement is not None
        tables = image.tables
        shapes = {table.shape for table in (tables.rank, tables.a_offset, tables.b_offset)}
        if shapes != {self._table_shape}:
            raise ValueError(f"the tables have shapes {shapes}, not {self._table_shape}")
        command = write_slot(entry.slot, image.tables, entry.placement)
        self.commands.slots[entry.slot] = command
        entry.max_rank = int(command.rank.max())
        entry.num_unpaid_bytes = image.num_bytes

    def charge(self, entry: AdapterEntry, tenant: Tenant) -> None:
        """Charges the adapter, and any device memory that it has, to the tenant."""
        self._broker.bytes_held.accounts.note(tenant)
        entry.account = tenant.name
        if entry.placement is not None:
            self.placements.charge(entry.placement, tenant.name)

    def free(self, entry: AdapterEntry) -> None:
        """Frees the adapter's memory and slot. The adapter must be neither leased nor loading."""
        if entry.slot is not None and entry.placement is not None:
            self.commands.slots[entry.slot] = ClearSlot(entry.slot)
            self._free_slots.append(entry.slot)
            self.placements.free(entry.placement)
            del self.resident[entry.placement]
            entry.placement = entry.slot = None
        entry.forget()

    def idle(self, *, with_awaited: bool) -> Mapping[Placement, float]:
        """Returns the adapters that may be evicted (see `AdapterHolder.idle`)."""
        now = self._clock()
        return {
            placement: entry.device_loss_s(now)
            for placement, entry in self.resident.items()
            if entry.is_idle and (with_awaited or not entry.is_awaited)
        }

    def evict(self, placement: Placement) -> None:
        """Evicts an idle adapter from the device."""
        self.num_evictions += 1
        self.free(self.resident[placement])

    def _free_slot(self, account: str, *, is_first: bool) -> bool:
        """Evicts, to free a slot, the idle adapter of lowest reload cost per byte from the account
        with the most slots relative to its weight. Returns False if no adapter may be evicted."""
        ask = self._ask_for_slot(account, is_first=is_first)
        losses = {
            placement: (ask.priority([name]), cost_s / placement.num_bytes)
            for placement, cost_s in self.idle(with_awaited=False).items()
            if ask.may_take([name := self.resident[placement].account])
        }
        if losses:
            self.evict(min(losses, key=losses.__getitem__))
        return bool(losses)

    def may_displace(self, entry: AdapterEntry, other: AdapterEntry) -> bool:
        """Whether the adapter `other` would be evicted for `entry` once `other` is idle."""
        is_first = self._is_first(entry.account)
        asks = [Ask(self._broker.bytes_held, entry.account, entry.image_bytes, is_first=is_first)]
        if not self._free_slots:
            asks.append(self._ask_for_slot(entry.account, is_first=is_first))
        return all(ask.may_take([other.account]) for ask in asks)

    def check_integrity(self, entries: Collection[AdapterEntry]) -> None:
        """Raises IntegrityError unless slots, placements and leases agree."""
        placed = {entry.placement: entry for entry in entries if entry.placement is not None}
        require(placed == self.resident, f"{len(placed)} on the device")
        for entry in entries:
            name = entry.digest[:12]
            require((entry.placement is None) == (entry.slot is None), f"{name}: half placed")
            require(entry.leases >= 0, f"{name}: {entry.leases} leases")
            require(entry.leases == 0 or entry.is_ready, f"{name}: leased, not on the device")
        for placement, entry in placed.items():
            account = self.placements.account_of(placement)
            require(account == entry.account, f"{entry.digest[:12]} is charged to another account")
        slots = sorted([*self._free_slots, *(e.slot for e in entries if e.slot is not None)])
        require(slots == list(range(self.num_slots)), f"slots {slots}")
        self.placements.check_integrity()
        self._broker.check_integrity()

    def _is_first(self, account: str) -> bool:
        """Whether none of the account's adapters on the device is leased, loading or awaited."""
        own = (entry for entry in self.resident.values() if entry.account == account)
        return not any(e.leases or e.loading or e.is_awaited for e in own)

    def _ask_for_slot(self, account: str, *, is_first: bool) -> Ask:
        accounts = self._broker.bytes_held.accounts
        slots = Holdings(accounts, ((e.account, 1) for e in self.resident.values()))
        return Ask(slots, account, 1, is_first=is_first)


def write_slot(slot: int, image: ImageTables, placement: Placement) -> WriteSlot:
    """Returns the command that writes the table entries of an image that is placed there."""
    starts = np.array([piece.start for piece in placement.pieces])
    shifts = np.array([piece.offset - piece.start for piece in placement.pieces])

    def moved(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        return offsets + shifts[np.searchsorted(starts, offsets, "right") - 1]

    replaced: dict[int, TableRows] = {}
    for module, rows in image.replaced.items():
        ids, first = moved(np.array([rows.ids, rows.rows])).tolist()
        replaced[module] = replace(rows, ids=ids, rows=first)
    offsets = moved(image.a_offset), moved(image.b_offset)
    return WriteSlot(slot, *offsets, image.rank.copy(), replaced)
