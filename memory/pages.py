"""KV pages of one owner in the arena, reference-counted and charged to accounts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memory.accounts import NO_TENANT
from memory.arena import Arena
from memory.errors import IntegrityError, require


class PagePool:
    """Pool of pages of one size. Page id = extent * pages_per_extent + index in the extent, so no
    page crosses an extent boundary.

    New pages are allocated in the fullest extent that has room, so that other extents drain. An
    extent without used pages returns to the arena at once. While a page has a reference, it is used
    and is charged to the account that it was allocated for.
    """

    def __init__(self, arena: Arena, owner: str, page_bytes: int) -> None:
        """Raises ValueError if a page does not fit into an extent."""
        if not 0 < page_bytes <= arena.extent_bytes:
            raise ValueError(f"a page of {page_bytes} bytes in extents of {arena.extent_bytes}")
        self._arena = arena
        self.owner = owner
        self.page_bytes = page_bytes
        self.pages_per_extent = arena.extent_bytes // page_bytes
        self._references: dict[int, int] = {}
        self._accounts: dict[int, str] = {}
        self._free: dict[int, list[int]] = {}
        """Stack of the free pages of each extent that the pool holds."""
        self._extents_with: list[dict[int, None]] = [{} for _ in range(self.pages_per_extent + 1)]
        """The pool's extents, by number of free pages: entry n has extents with n free pages."""
        self._num_held_free = 0

    @property
    def num_used(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Number of free pages in the pool's extents, plus the pages that fit into free extents."""
        return self._num_held_free + self._arena.num_kv_obtainable * self.pages_per_extent

    def allocate(self, num_pages: int, account: str = NO_TENANT.name) -> list[int] | None:
        """Allocates pages with one reference each, owned by the caller. Returns None, and changes
        nothing, if too few are free."""
        if num_pages > self.num_free:
            return None
        pages: list[int] = []
        while len(pages) < num_pages:
            extent = self._fullest_extent()
            free = self._free[extent]
            count = min(num_pages - len(pages), len(free))
            self._move(extent, len(free), len(free) - count)
            pages += [free.pop() for _ in range(count)]
        self._references.update(dict.fromkeys(pages, 1))
        self._accounts.update(dict.fromkeys(pages, account))
        self._charge(account, num_pages)
        return pages

    def retain(self, page: int) -> None:
        """Adds a reference, owned by the caller, to a used page."""
        if page not in self._references:
            raise IntegrityError(f"page {page} of {self.owner!r} is free")
        self._references[page] += 1

    def release(self, page: int) -> int:
        """Releases one reference and returns the number left. At 0 the page is free."""
        count = self._references.get(page, 0) - 1
        if count < 0:
            raise IntegrityError(f"page {page} of {self.owner!r} is released but has no holder")
        if count:
            self._references[page] = count
        else:
            del self._references[page]
            self._charge(self._accounts.pop(page), -1)
            self._put_back(page)
        return count

    def num_references(self, page: int) -> int:
        return self._references.get(page, 0)

    def account_of(self, page: int) -> str:
        return self._accounts[page]

    def held_bytes(self) -> Counter[str]:
        """Returns the bytes of used pages by account, recounted from all pages."""
        held = Counter(self._accounts.values())
        return Counter({name: count * self.page_bytes for name, count in held.items()})

    def extent_of(self, page: int) -> int:
        return page // self.pages_per_extent

    def num_used_in(self, extent: int) -> int:
        return self.pages_per_extent - len(self._free[extent])

    def offsets(self, page_ids: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Returns each page's byte offset in the device's memory, shaped like `page_ids`."""
        extents, places = np.divmod(page_ids.astype(np.int64), self.pages_per_extent)
        first = self._arena.first_byte
        return first + extents * self._arena.extent_bytes + places * self.page_bytes

    def _charge(self, account: str, num_pages: int) -> None:
        self._arena.bytes_held.charge(account, num_pages * self.page_bytes)

    def _fullest_extent(self) -> int:
        for extents in self._extents_with[1:]:
            if extents:
                return next(iter(extents))
        extent = self._arena.allocate_kv(self.owner)
        assert extent is not None, "num_free counted an extent that the arena does not give"
        first = extent * self.pages_per_extent
        self._free[extent] = list(range(first + self.pages_per_extent - 1, first - 1, -1))
        self._extents_with[self.pages_per_extent][extent] = None
        self._num_held_free += self.pages_per_extent
        return extent

    def _put_back(self, page: int) -> None:
        extent = self.extent_of(page)
        free = self._free[extent]
        free.append(page)
        self._move(extent, len(free) - 1, len(free))
        if len(free) == self.pages_per_extent:
            del self._extents_with[self.pages_per_extent][extent]
            del self._free[extent]
            self._num_held_free -= self.pages_per_extent
            self._arena.free_kv(extent, self.owner)

    def _move(self, extent: int, old: int, new: int) -> None:
        """Records that the extent has `new` free pages instead of `old`."""
        del self._extents_with[old][extent]
        self._extents_with[new][extent] = None
        self._num_held_free += new - old

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each page of the pool's extents is free or referenced."""
        held = self._arena.kv_extents(self.owner)
        require(held == set(self._free), f"extents {held} by the arena, {set(self._free)} here")
        pages = [*self._references, *(page for free in self._free.values() for page in free)]
        size = self.pages_per_extent
        expected = [extent * size + place for extent in sorted(held) for place in range(size)]
        require(
            sorted(pages) == expected,
            f"{self.num_used} used pages and {len(pages) - self.num_used} free ones are not the "
            f"{len(expected)} pages of {len(held)} extents",
        )
        require(min(self._references.values(), default=1) > 0, "a used page without a reference")
        require(self._accounts.keys() == self._references.keys(), "a used page has no account")
        for extent, free in self._free.items():
            require(len(free) < size, f"extent {extent} is empty and was not given back")
            require(extent in self._extents_with[len(free)], f"extent {extent} is filed wrongly")
        num_filed = sum(map(len, self._extents_with))
        require(num_filed == len(held), f"{num_filed} extents filed, {len(held)} held")
        num_free = len(pages) - self.num_used
        require(self._num_held_free == num_free, f"{self._num_held_free} free, in fact {num_free}")
