"""Loads the C++ kernels: opens a library, gives its functions their types, and checks it.
Declares the structures that the functions take.

Without their types ctypes would cut pointers to 32 bits.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

from ops.build import BuildError, compile_library, find_shipped


class NativePart(Structure):
    """Some output columns of a linear. Matches the struct `LinearPart` in native/kernels.h."""

    _fields_ = (("panels", c_void_p), ("format", c_int64), ("columns", c_int64))


class NativeLinear(Structure):
    _fields_ = (
        ("parts", POINTER(NativePart)),
        ("bias", c_void_p),
        ("projections", POINTER(c_int32)),
        ("widths", POINTER(c_int32)),
        ("num_parts", c_int64),
        ("num_projections", c_int64),
        ("in_features", c_int64),
        ("out_features", c_int64),
    )


class NativeNorm(Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_double))


class NativeLayer(Structure):
    _fields_ = (
        *((name, NativeLinear) for name in ("qkv", "output", "gate_up", "down")),
        *((name, NativeNorm) for name in ("q", "k", "post_attention", "mlp", "post_mlp")),
        ("following", NativeNorm),
        ("rope", c_void_p),
        *((name, c_int64) for name in ("layer", "num_heads", "window", "silu")),
        ("scale", c_double),
        ("softcap", c_double),
    )


class NativeStep(Structure):
    """Step of all layers. This structure and those above match the ones in native/layers.cpp."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "num_seqs", "max_context", "table_stride")),
        *((name, c_void_p) for name in ("query_start", "token_seq", "positions", "block_tables")),
        ("arena", c_void_p),
        *((name, c_int64) for name in ("layer_bytes", "num_kv", "dim", "kv_format")),
        ("num_segments", c_int64),
        ("segment_start", c_void_p),
        ("segment_slot", c_void_p),
        *((name, c_int64) for name in ("layer_entries", "slot_entries")),
        *((name, c_void_p) for name in ("a_offset", "b_offset", "rank", "lora_arena")),
        ("lora_format", c_int64),
    )


SAMPLING_POINTERS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "position", "choice"),
    *("presence", "frequency", "repetition", "token_buffer", "buffer_slot"),
    *("prompt_len", "total_len", "bias_start", "bias_ids", "bias_values"),
)


class Sampling(Structure):
    """`SamplingBatch` as pointers. Matches the struct `Sampling` in native/sampling.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in SAMPLING_POINTERS),
        ("token_buffer_stride", c_int64),
        ("has_penalties", c_int64),
        ("has_bias", c_int64),
    )


P, I32, I64, F32 = c_void_p, c_int, c_int64, c_float
SIGNATURES: dict[str, tuple[type, ...]] = {
    "set_num_threads": (I32,),
    "team_ids": (I32, P),
    "pack_linear": (P, I32, I64, I64, P),
    "pack_blocks": (P, P, P, I32, I64, I64, P),
    "linear": (P, I64, I64, POINTER(NativePart), I64, P, I64, P),
    "embed": (P, I64, P, I32, I64, F32, P),
    "rms_norm": (P, P, P, I64, I64, F32, P),
    "gated_activation": (P, I64, I64, I32, P),
    "rope_write_kv": (P, I64, I64, I64, I64, P, P, P, F32, P, P, P, I64, P, I64, I32),
    "paged_attention": (
        *(P, I64, P, P, I64, P, I64, P, I64, I32),
        *(I64, I64, I64, F32, I64, F32, P, P),
    ),
    "add_lora": (P, P, I64, P, P, I64, I64, I64, P, P, I64, P, P, P, P, I32),
    "add_embedding_lora": (P, P, I64, F32, I64, I64, P, P, I64, P, P, P, P, I32),
    "row_products": (P, I64, I64, P, I64, I32, P),
    "run_layers": (P, I64, POINTER(NativeStep), P, P),
    "sample": (P, I64, I64, POINTER(Sampling), P),
    "greedy": (P, I64, I64, P),
    "log_softmax_top": (P, P, I64, I64, I64, P, P, P),
}

_FAULTS = {
    1: "the system does not let this process use AMX (arch_prctl refused ARCH_REQ_XCOMP_PERM)",
    2: "the processor's AMX instructions do not give the bits that they are specified to give",
}
"""Faults by the result of `check_tiles` in native/tile_checks.cpp. The result 0 means no fault."""


def load(variant: str) -> ctypes.CDLL:
    """Loads the library of a variant, shipped or compiled, and runs its self-check, which takes a
    few milliseconds for `amx` and no time for other variants. Raises BuildError."""
    library = open_library(find_shipped(variant) or compile_library(variant))
    if fault := _FAULTS.get(library.check_tiles()):
        raise BuildError(f"{variant} cannot be used: {fault}")
    return library


def open_library(path: Path) -> ctypes.CDLL:
    """Opens a library and declares the types of its functions. Raises BuildError if it cannot be
    opened."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot load {path}: {error}") from error
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library
