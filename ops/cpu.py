"""CPU backend: C++ kernels behind a C ABI, called through ctypes.

This module checks shapes and types and passes pointers. The computation is in `native/`.
"""

from __future__ import annotations

import ctypes
import warnings
from ctypes import byref, c_int32

import torch
from torch import Tensor

from ops import build
from ops.base import (
    EMBEDDING,
    PAGE_TOKENS,
    Activation,
    FusedLinear,
    HostOps,
    LayerAttention,
    LayerStack,
    LayerWeights,
    LoRABatch,
    PackedLinear,
    QKNorm,
    SamplingBatch,
)
from ops.block_matrix import Weight
from ops.cpu_layers import NativeLayers
from ops.factor_layout import PANELS, FactorLayout
from ops.kernel_library import SAMPLING_POINTERS, Sampling, load
from ops.panel_linear import PanelLinear
from ops.processor import Processor
from ops.scheduler_times import SchedulerTimes
from ops.thread_count import ThreadCount
from ops.variant_choice import choose_variant
from ops.weight_format import WeightFormat


class CpuOps(HostOps):
    """Ops in C++. In a page, K is `[G][D][PAGE_TOKENS]` and V is `[G][PAGE_TOKENS][D]`. With
    bfloat16 pages in the variants `amx` and `tiles`, K is `[G][D / 2][PAGE_TOKENS][2]` and V is
    `[G][PAGE_TOKENS / 2][D][2]`.

    variant: key of `build.VARIANTS`; None selects the processor's fastest. threads: maximum number
    of threads, see `ops.thread_count`; None uses torch's number. Raises build.BuildError.
    """

    name = "cpu"
    device = torch.device("cpu")
    factor_layout: FactorLayout = PANELS
    keeps_blocks = True
    head_dims = range(PAGE_TOKENS, 256 + 1, PAGE_TOKENS)

    def __init__(self, *, variant: str | None = None, threads: int | None = None) -> None:
        self.variant = variant or choose_variant("", Processor.here()).variant
        self._lib = load(self.variant)
        self.rounds_input = bool(self._lib.rounds_input())
        """Whether a bfloat16 linear also rounds its input, as `amx` and `avx512bf16` do."""
        self._fused_linears: dict[
            FusedLinear, tuple[ctypes.Array[c_int32], ctypes.Array[c_int32]]
        ] = {}
        limit = threads or torch.get_num_threads()
        runtimes = build.mapped_openmp()
        if limit > 1 and len(runtimes) > 1:
            warnings.warn(
                f"several OpenMP runtimes are loaded ({', '.join(runtimes)}): one thread is used",
                RuntimeWarning,
                stacklevel=2,
            )
            limit = 1
        self.threads = ThreadCount(limit, SchedulerTimes(), self.team_ids)
        self._lib.set_num_threads(limit)

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        return torch.float32

    def pack_linear(self, *weights: Weight, bias: Tensor | None = None) -> PackedLinear:
        return PanelLinear(self._lib, weights, bias)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        assert isinstance(weight, PanelLinear)
        rows, depth = x.shape
        assert depth == weight.in_features and _is_float(x)
        y = torch.empty(rows, weight.out_features)
        self._lib.linear(
            *(x.data_ptr(), rows, depth, weight.parts, weight.num_parts, weight.bias_ptr),
            *(weight.out_features, y.data_ptr()),
        )
        return y

    def embed(self, ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        assert ids.dtype is torch.int32 and table.is_contiguous()
        rows, width = len(ids), table.shape[1]
        y = torch.empty(rows, width)
        self._lib.embed(
            *(ids.data_ptr(), rows, table.data_ptr(), WeightFormat.of(table.dtype), width, scale),
            y.data_ptr(),
        )
        return y

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        assert _is_float(x) and weight.dtype is torch.float32
        assert residual is None or (_is_float(residual) and residual.shape == x.shape)
        y = torch.empty_like(x)
        self._lib.rms_norm(
            *(x.data_ptr(), 0 if residual is None else residual.data_ptr(), weight.data_ptr()),
            *(*x.shape, eps, y.data_ptr()),
        )
        return y

    def rope_write_kv(
        self, qkv: Tensor, rope: Tensor | None, at: LayerAttention, qk_norm: QKNorm | None = None
    ) -> None:
        batch, layout, tables = at.batch, at.kv.layout, at.batch.block_tables
        num_kv, dim = layout.num_kv_heads, layout.head_dim
        rows, width = qkv.shape
        assert _is_float(qkv) and tables.dtype is torch.int64
        assert width == (at.num_heads + 2 * num_kv) * dim
        assert rope is None or (_is_float(rope) and rope.shape[1] == dim)
        angles = 0 if rope is None else rope.data_ptr()
        norm = (0, 0, 0.0)
        if qk_norm is not None:
            norm = (qk_norm.q_weight.data_ptr(), qk_norm.k_weight.data_ptr(), qk_norm.eps)
        self._lib.rope_write_kv(
            *(qkv.data_ptr(), rows, at.num_heads, num_kv, dim, angles, *norm),
            *(batch.token_seq.data_ptr(), batch.positions.data_ptr()),
            *(tables.data_ptr(), tables.stride(0), at.kv.arena.data_ptr()),
            *(at.layer * layout.layer_bytes, WeightFormat.of(layout.dtype)),
        )

    def paged_attention(self, qkv: Tensor, at: LayerAttention) -> Tensor:
        batch, layout, tables = at.batch, at.kv.layout, at.batch.block_tables
        num_heads, num_kv, dim = at.num_heads, layout.num_kv_heads, layout.head_dim
        assert _is_float(qkv) and tables.dtype is torch.int64
        assert dim in self.head_dims and (at.sinks is None or _is_float(at.sinks))
        out = torch.empty(len(qkv), num_heads * dim)
        self._lib.paged_attention(
            *(qkv.data_ptr(), len(batch.context_lens), batch.query_start.data_ptr()),
            *(batch.positions.data_ptr(), batch.max_context, tables.data_ptr(), tables.stride(0)),
            *(at.kv.arena.data_ptr(), at.layer * layout.layer_bytes, WeightFormat.of(layout.dtype)),
            *(num_heads, num_kv, dim, at.scale, at.window or 0, at.softcap or 0.0),
            *(0 if at.sinks is None else at.sinks.data_ptr(), out.data_ptr()),
        )
        return out

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        assert _is_float(gate_up)
        rows, width = len(gate_up), gate_up.shape[1] // 2
        y = torch.empty(rows, width)
        self._lib.gated_activation(
            gate_up.data_ptr(), rows, width, activation == "silu", y.data_ptr()
        )
        return y

    def add_lora(
        self, y: Tensor, x: Tensor, fused: FusedLinear, layer: int, lora: LoRABatch
    ) -> None:
        assert _is_float(x) and _is_float(y) and x.shape[1] == fused.in_features
        tables = lora.tables
        projections, widths = self._fused_arrays(fused)
        self._lib.add_lora(
            *(y.data_ptr(), x.data_ptr(), fused.in_features, projections, widths, len(widths)),
            *(layer * tables.rank.shape[2], tables.rank[0].numel()),
            *(lora.segment_start.data_ptr(), lora.segment_slot.data_ptr()),
            *(len(lora.segment_slot), tables.a_offset.data_ptr(), tables.b_offset.data_ptr()),
            *(tables.rank.data_ptr(), lora.arena.data_ptr(), WeightFormat.of(lora.dtype)),
        )

    def add_embedding_lora(self, y: Tensor, ids: Tensor, lora: LoRABatch, scale: float) -> None:
        assert _is_float(y) and ids.dtype is torch.int32 and len(ids) == len(y)
        tables = lora.tables
        self._lib.add_embedding_lora(
            *(y.data_ptr(), ids.data_ptr(), y.shape[1], scale),
            *(lora.outer_layer * tables.rank.shape[2] + EMBEDDING, tables.rank[0].numel()),
            *(lora.segment_start.data_ptr(), lora.segment_slot.data_ptr()),
            *(len(lora.segment_slot), tables.a_offset.data_ptr(), tables.b_offset.data_ptr()),
            *(tables.rank.data_ptr(), lora.arena.data_ptr(), WeightFormat.of(lora.dtype)),
        )

    def row_products(self, x: Tensor, rows: Tensor) -> Tensor:
        assert _is_float(x) and rows.is_contiguous() and x.shape[1] == rows.shape[1]
        y = torch.empty(len(x), len(rows))
        self._lib.row_products(
            *(x.data_ptr(), *x.shape, rows.data_ptr(), len(rows)),
            *(WeightFormat.of(rows.dtype), y.data_ptr()),
        )
        return y

    def bind_layers(self, layers: list[LayerWeights]) -> LayerStack:
        for layer in layers:
            assert _is_float(layer.rope) and layer.rope.shape[1] in self.head_dims
        return NativeLayers(self._lib, layers, self._after_step)

    def _after_step(self, begin: float, end: float) -> None:
        self._lib.set_num_threads(self.threads.record_step(begin, end))

    def team_ids(self, count: int) -> list[int]:
        """Returns the ids (`gettid`) of the threads that compute the calling thread's ops."""
        ids = (c_int32 * count)()
        self._lib.team_ids(count, ids)
        return [each for each in ids if each]

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        assert _is_float(logits)
        tokens = torch.empty(len(logits), dtype=torch.int32)
        if batch.all_greedy and not batch.has_penalties and not batch.has_bias:
            self._lib.greedy(logits.data_ptr(), *logits.shape, tokens.data_ptr())
        else:
            self._lib.sample(
                logits.data_ptr(), *logits.shape, byref(_sampling(batch)), tokens.data_ptr()
            )
        return tokens

    def log_softmax_top(
        self, logits: Tensor, tokens: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert _is_float(logits) and tokens.dtype is torch.int32
        rows, vocab = logits.shape
        chosen, values = torch.empty(rows), torch.empty(rows, num_top)
        ids = torch.empty(rows, num_top, dtype=torch.int32)
        self._lib.log_softmax_top(
            *(logits.data_ptr(), tokens.data_ptr(), rows, vocab, num_top),
            *(chosen.data_ptr(), ids.data_ptr(), values.data_ptr()),
        )
        return chosen, ids, values

    def _fused_arrays(
        self, fused: FusedLinear
    ) -> tuple[ctypes.Array[c_int32], ctypes.Array[c_int32]]:
        arrays = self._fused_linears.get(fused)
        if arrays is None:
            kind = c_int32 * len(fused.projections)
            arrays = self._fused_linears[fused] = (kind(*fused.projections), kind(*fused.widths))
        return arrays


def _is_float(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_contiguous()


def _sampling(batch: SamplingBatch) -> Sampling:
    pointers = {name: getattr(batch, name).data_ptr() for name in SAMPLING_POINTERS}
    return Sampling(
        **pointers,
        token_buffer_stride=batch.token_buffer.stride(0),
        has_penalties=batch.has_penalties,
        has_bias=batch.has_bias,
    )
