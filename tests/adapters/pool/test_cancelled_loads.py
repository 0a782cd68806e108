"""Cancelled and failed loads of adapters give back all that they took, at once and without the
collector of cycles."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.pool import device, loader
from adapters.pool.device import DeviceTier
from adapters.pool.host_slab import UNIT_BYTES, HostSlab
from adapters.pool.image import ImageCache
from adapters.pool.loader import AdapterLoader
from adapters.pool.packed_image import AdapterImage
from tests.adapters.pools import PoolSetup

ROUNDS = 200
SLAB_UNITS = 64


class Injected(Exception):
    pass


def failing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Fails after the call, whose result only the frames of the error have then."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        raise Injected(str(type(result)))

    return fail


POINTS = {
    "packed": (loader, "pack"),
    "summed": (AdapterImage, "of"),
    "cached": (ImageCache, "save"),
    "read": (ImageCache, "load"),
    "pinned": (HostSlab, "copy"),
    "fetched": (AdapterLoader, "fetch"),
    "placed": (DeviceTier, "serve"),
    "tables": (device, "write_slot"),
}
"""Stages that fail after they have done their work: fetch, copy and tables of an adapter."""
CANCELS = ("queued", "fetching", "copying", "resident")


def test_the_memory_of_cancelled_and_failed_loads_of_adapters_is_free_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_collector: None
) -> None:
    rng = random.Random(7)
    setup = PoolSetup(tmp_path, [2, 4, 8])
    slab = HostSlab(np.zeros(SLAB_UNITS * UNIT_BYTES, np.uint8))
    setup.loader._slab = slab
    alive: list[weakref.ref[Any]] = []
    image_of = AdapterImage.of

    def watched(digest: str, tables: Any, payload: Any) -> AdapterImage:
        alive.append(weakref.ref(payload))
        image = image_of(digest, tables, payload)
        alive.append(weakref.ref(image))
        return image

    kinds = [*POINTS, *CANCELS]
    for number in range(ROUNDS):
        kind, index = kinds[number % len(kinds)], rng.randrange(3)
        ref = setup.refs[index]
        with monkeypatch.context() as patched:
            patched.setattr(AdapterImage, "of", watched)
            if kind in POINTS:
                owner, name = POINTS[kind]
                call = getattr(owner, name)
                wrapped = failing(call)
                patched.setattr(owner, name, staticmethod(wrapped) if name == "of" else wrapped)
            setup.pool.acquire(ref)
            if kind in CANCELS:
                for _ in range(CANCELS.index(kind)):
                    setup.executor.step()
                setup.pool.cancel(ref)
            setup.settle()
        setup.now += 60.0
        setup.pool.cancel(ref)
        setup.settle()
        entry = setup.pool.entries.get(ref.digest)
        if entry is not None:  # An image that was loaded in the end: it is counted, and given back.
            setup.pool.loads.unload(entry)
            entry = None
        setup.pool.begin_step(())
        setup.check()
        assert not setup.pool.entries, kind
        assert not setup.host.images.num_bytes, kind
        assert [each() for each in alive if each() is not None] == [], kind
        alive.clear()
        whole = slab.copy(np.zeros(SLAB_UNITS * UNIT_BYTES, np.uint8))
        assert whole is not None, f"{kind}: pinned memory is held"
        del whole
        if rng.random() < 0.5:
            setup.cache.delete(setup.loader.layout.version, ref.digest)
