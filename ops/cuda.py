"""CUDA backend. cuBLAS computes matrix products, and the Triton kernels in this folder the rest.

This module checks shapes and types and passes tensors. No op waits for the device or reads a
tensor's values, so that a step can be captured into a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor
from triton import knobs

from ops import (
    triton_attention,
    triton_logprobs,
    triton_lora,
    triton_pointwise,
    triton_rope,
    triton_sampling,
    triton_table,
)
from ops.base import (
    EVEN,
    Activation,
    DeviceEvent,
    FusedLinear,
    LayerAttention,
    LoRABatch,
    PackedLinear,
    PassedEvent,
    QKNorm,
    SamplingBatch,
    StreamName,
)
from ops.block_matrix import Weight, densify
from ops.factor_layout import ROWS
from ops.plain_linear import PlainLinear


class _Compiled:
    """Counter of the kernels that Triton compiles or loads in this process."""

    def __init__(self) -> None:
        self.count = 0
        knobs.runtime.jit_post_compile_hook = self

    def __call__(self, **_: object) -> None:
        self.count += 1


_compiled = _Compiled()


class CudaOps:
    """Ops in Triton. In a page, K and V both are `[G][PAGE_TOKENS][D]`.

    Offsets of pages and factors are multiples of `triton_table.ALIGNMENT`. Activations are in the
    serving dtype. Weights, pages and factors of a narrower dtype are converted to the activations'
    dtype.

    device: a CUDA device, or the CPU if Triton interprets its kernels (TRITON_INTERPRET=1).
    """

    name = "cuda"
    factor_layout = ROWS
    shares_tables = True
    keeps_blocks = False
    head_dims = EVEN

    def __init__(self, device: torch.device, cache_dir: Path | None = None) -> None:
        """cache_dir: folder in which compiled kernels are stored for later processes; None uses
        Triton's default folder."""
        self.device = device
        self.compiles = device.type == "cuda"
        if cache_dir is not None:
            cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            knobs.cache.dir = str(cache_dir)
        self._graph_pool, self._streams = None, dict[str, torch.cuda.Stream]()
        self.overlaps, self.shared_bytes = False, 0
        """overlaps: whether a kernel may start before the kernel whose results it needs has ended.
        shared_bytes: maximum bytes of shared memory of a program."""
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.overlaps = properties.major >= 9
            # Builds of torch for GPUs of other vendors may lack `shared_memory_per_block_optin`.
            self.shared_bytes = getattr(properties, "shared_memory_per_block_optin", 0)
            self._graph_pool = torch.cuda.graph_pool_handle()
            # The streams are created once. torch gives out 32 streams in rotation, so a copy could
            # otherwise get the capture's stream.
            for name in ("capture", *get_args(StreamName)):
                self._streams[name] = torch.cuda.Stream(device)
        # Disabled because cuBLAS may otherwise add the partial sums of a product in bfloat16.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_tf32 = False

    @property
    def num_compiled(self) -> int:
        return _compiled.count

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        return weights

    def pack_linear(self, *weights: Weight, bias: Tensor | None = None) -> PackedLinear:
        weight = densify(weights)
        return PlainLinear(
            weight.clone(memory_format=torch.contiguous_format),
            None if bias is None else bias.to(weight.dtype, copy=True),
        )

    def table_linear(self, table: Tensor) -> PackedLinear:
        assert table.is_contiguous()
        return PlainLinear(table)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        assert isinstance(weight, PlainLinear)
        bias = None if weight.bias is None else weight.bias.to(x.dtype)
        return torch.nn.functional.linear(x, weight.weight.to(x.dtype), bias)

    def embed(self, ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        assert ids.dtype is torch.int32 and table.is_contiguous()
        return triton_pointwise.embed(ids, table, scale)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        assert x.is_contiguous() and weight.dtype is torch.float32
        assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
        return triton_pointwise.rms_norm(x, weight, eps, residual)

    def rope_write_kv(
        self, qkv: Tensor, rope: Tensor | None, at: LayerAttention, qk_norm: QKNorm | None = None
    ) -> None:
        layout = at.kv.layout
        assert qkv.is_contiguous() and at.batch.block_tables.dtype is torch.int64
        assert qkv.shape[1] == (at.num_heads + 2 * layout.num_kv_heads) * layout.head_dim
        assert rope is None or (rope.dtype is torch.float32 and rope.shape[1] == layout.head_dim)
        triton_rope.rope_write_kv(qkv, rope, at, qk_norm)

    def paged_attention(self, qkv: Tensor, at: LayerAttention) -> Tensor:
        batch, num_kv, dim = at.batch, at.kv.layout.num_kv_heads, at.kv.layout.head_dim
        assert qkv.is_contiguous() and batch.block_tables.dtype is torch.int64
        assert at.num_heads % num_kv == 0
        group, itemsize = at.num_heads // num_kv, qkv.itemsize
        short = triton_table.short_attention(
            len(batch.context_lens), num_kv, group, batch.max_context, itemsize
        )
        long = triton_table.long_attention(group, dim, itemsize, self.shared_bytes)
        return triton_attention.paged_attention(qkv, at, short, long)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        assert gate_up.is_contiguous()
        return triton_pointwise.gated_activation(gate_up, activation)

    def add_lora(
        self, y: Tensor, x: Tensor, fused: FusedLinear, layer: int, lora: LoRABatch
    ) -> None:
        assert x.is_contiguous() and y.is_contiguous() and x.dtype is y.dtype
        assert x.shape[1] == fused.in_features and y.shape[1] == sum(fused.widths)
        rows, segments, ranks = len(x), len(lora.segment_slot), lora.max_rank
        if rows and segments and ranks:
            blocks = triton_table.shrink(rows, segments, x.shape[1], ranks, x.itemsize)
            planes = triton_lora.shrink(x, fused, layer, lora, blocks, self.overlaps)
            blocks = triton_table.expand(rows, segments, ranks, y.itemsize)
            triton_lora.expand_add(y, planes, fused, layer, lora, blocks, self.overlaps)

    def add_embedding_lora(self, y: Tensor, ids: Tensor, lora: LoRABatch, scale: float) -> None:
        assert y.is_contiguous() and ids.dtype is torch.int32 and len(ids) == len(y)
        if len(y) and len(lora.segment_slot) and lora.max_rank:
            blocks = triton_table.expand_by_row(lora.max_rank)
            triton_lora.add_tokens(y, ids, lora, scale, blocks)

    def row_products(self, x: Tensor, rows: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, rows.to(x.dtype))

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        assert logits.dtype is torch.float32 and logits.is_contiguous()
        return triton_sampling.sample(logits, batch)

    def log_softmax_top(
        self, logits: Tensor, tokens: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert logits.dtype is torch.float32 and logits.is_contiguous()
        return triton_logprobs.log_softmax_top(logits, tokens, num_top)

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Captures the work as a CUDA graph. All graphs share one memory pool, so a result is valid
        until the next replay of any of them."""
        if self.device.type == "cpu":
            return work
        stream, current = self._streams["capture"], torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            work()  # kernels and workspaces made at the first call must not be captured
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # The mode is thread_local because loader threads copy and allocate during the capture.
            with torch.cuda.graph(
                graph, pool=self._graph_pool, stream=stream, capture_error_mode="thread_local"
            ):
                result = work()
        finally:
            # If the end of the capture fails, torch does not restore the current stream.
            torch.cuda.set_stream(current)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    @contextmanager
    def side_stream(self, name: StreamName) -> Iterator[None]:
        if self.device.type == "cpu":
            yield
            return
        with torch.cuda.stream(self._streams[name]):
            yield

    def record_event(self) -> DeviceEvent:
        if self.device.type == "cpu":
            return PassedEvent()
        event = torch.cuda.Event()
        event.record()
        return event
