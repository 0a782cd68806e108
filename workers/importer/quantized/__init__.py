"""Dequantises the matrices of quantised checkpoints, in the same way as the libraries that wrote
the checkpoints.

Each format has its own Python module. The names and shapes of the stored tensors show which
matrices are quantised, and usually with how many bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workers.importer.canonical import ImportRefused
from workers.importer.quantized.awq import open_awq
from workers.importer.quantized.bitsandbytes import find_bitsandbytes
from workers.importer.quantized.compressed_tensors import open_compressed_tensors
from workers.importer.quantized.float8 import open_float8
from workers.importer.quantized.gptq import open_gptq
from workers.importer.quantized.matrix import FindMatrix

METHODS: dict[str, Callable[[dict[str, Any]], FindMatrix]] = {
    "awq": open_awq,
    "bitsandbytes": lambda config: find_bitsandbytes,
    "compressed-tensors": open_compressed_tensors,
    "fbgemm_fp8": open_float8,
    "fp8": open_float8,
    "gptq": open_gptq,
}


def open_quantization(config: object) -> FindMatrix:
    """Returns the function that finds the quantised matrices of a checkpoint with this
    `quantization_config`. Raises ImportRefused if the quantisation method is not supported."""
    method = config.get("quant_method") if isinstance(config, dict) else None
    if not isinstance(config, dict) or method not in METHODS:
        raise ImportRefused(
            f"quantization_config.quant_method = {method!r} is not supported; "
            f"allowed: {', '.join(METHODS)}"
        )
    return METHODS[method](config)
