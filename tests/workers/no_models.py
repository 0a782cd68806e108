"""A model pool of a worker whose engines keep their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from memory.arena import Arena
from memory.broker import MemoryBroker
from memory.tier import Tier
from ops.reference import ReferenceOps
from workers.base_models.fetcher import ModelFetcher
from workers.base_models.loader import ModelLoader
from workers.base_models.model_pool import ModelPool
from workers.base_models.residency import ModelResidency
from workers.verification.adapter_verifier import AdapterVerifier


def no_models(verifier: AdapterVerifier, clock: Callable[[], float]) -> ModelPool:
    arena = Arena(1 << 16, 1 << 16)
    return ModelPool(
        ModelResidency(0, clock=clock),
        arena,
        MemoryBroker(arena),
        ModelLoader(ReferenceOps()),
        ModelFetcher(_never, clock=clock),
        verifier,
        host=Tier(0),
        build=_never,
        clock=clock,
    )


def _never(*_: Any) -> NoReturn:
    raise AssertionError("there are no models")
