"""Writes a safetensors file tensor by tensor, so that memory never holds the whole model.

The format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BFloat16 = NDArray[np.uint16]
"""The bits of bfloat16, which numpy does not know."""
ALIGNMENT = 64


def write_safetensors(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], BFloat16],
    on_bytes: Callable[[int], None],
) -> None:
    """All tensors are bfloat16; `read` gives each when its turn comes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in shapes.items():
            tensor = read(name)
            assert tensor.shape == shape and tensor.dtype == np.uint16
            file.write(np.ascontiguousarray(tensor).data)
            on_bytes(tensor.nbytes)
