"""A backend on a device behind tests that make their tensors on the CPU."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ops.base import Ops


class Carried:
    """Sends every tensor of a call to the device, and what the call made of it back."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        return partial(self._call, value) if callable(value) else value

    def _call(self, op: Any, *args: Any, **options: Any) -> Any:
        pairs: list[tuple[Tensor, Tensor]] = []

        def send(value: Any) -> Any:
            if isinstance(value, Tensor):
                pairs.append((value, value.to(self._ops.device)))
                return pairs[-1][1]
            if is_dataclass(value) and not isinstance(value, type):
                return replace(
                    value, **{f.name: send(getattr(value, f.name)) for f in fields(value)}
                )
            return value

        result = op(*map(send, args), **{name: send(value) for name, value in options.items()})
        for here, there in pairs:
            here.copy_(there)
        return _fetch(result)


def _fetch(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(_fetch, result))
    return result.to(torch.device("cpu")) if isinstance(result, Tensor) else result
