"""Selects op backends by name. A backend is imported only when it is selected."""

from __future__ import annotations

import warnings
from typing import Any

from ops.base import Ops


def select(name: str, **options: Any) -> Ops:
    """Imports and returns the named backend. Raises ValueError if the name is unknown."""
    match name:
        case "reference":
            from ops.reference import ReferenceOps

            return ReferenceOps()
        case "cpu":
            return _cpu(**options)
        case "cuda":
            return _cuda(**options)
        case _:
            raise ValueError(f"unknown op backend {name!r}: there are 'reference', 'cpu', 'cuda'")


def _cuda(**options: Any) -> Ops:
    """Returns the Triton backend on the current GPU. Raises ValueError if there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("op backend 'cuda' needs a CUDA device, and torch sees none here")
    from ops.cuda import CudaOps

    return CudaOps(torch.device("cuda", torch.cuda.current_device()), **options)


def _cpu(**options: Any) -> Ops:
    """Returns the CPU backend. Warns and returns the reference backend if the kernels cannot be
    compiled or loaded."""
    from ops.build import BuildError
    from ops.cpu import CpuOps

    try:
        return CpuOps(**options)
    except BuildError as error:
        warnings.warn(f"slow reference ops are used: {error}", RuntimeWarning, stacklevel=3)
        return select("reference")
