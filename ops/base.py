"""Protocols that an op backend implements, and the structures that its ops are called with.

Every tensor is on the backend's device. The tokens of a step are ordered by sequence. Sequences
that share an adapter slot are neighbours, and base-only sequences are last. Unless stated
otherwise, a row of a matrix belongs to one token.

    S  sequences in the step        T  tokens in the step             L  layers
    H  query heads, G  KV heads     D  head size                      V  vocabulary

Activations have the dtype `activation_dtype(weights)`. On the CPU this is float32 for any serving
dtype, so that sums keep their precision between ops. Weights, KV pages and adapters have the
serving dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, runtime_checkable

import torch
from numpy.typing import NDArray
from torch import Tensor

from ops.block_matrix import Weight
from ops.commands import TableRows
from ops.factor_layout import FactorLayout

PAGE_TOKENS = 16
"""Number of tokens in a KV page, the same on every backend."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections of a native family that an adapter may touch, in the order of the `projection` axis
of `AdapterTables`."""

EMBEDDING, HEAD = range(2)
"""Indices of the embedding and the output matrix on the `projection` axis of `AdapterTables`, in
the last layer of the tables. This layer follows the layers of the model."""

Activation = Literal["silu", "gelu_tanh"]

StreamName = Literal["adapters", "weights"]
"""Names of side streams. Each kind of copy has its own stream, so that copies of adapters do not
wait for copies of weights."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of one model's KV page: K and V of `PAGE_TOKENS` tokens in all layers.

    A page is `[L][K then V][G][...]`. Each backend chooses the order of the `PAGE_TOKENS * D`
    elements of the inner `[...]`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer in one page."""
        return 2 * self.num_kv_heads * PAGE_TOKENS * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class KVCacheView:
    """Arena memory with the KV layout of one model, as attention reads it.

    arena: uint8 [arena bytes]. In a page at byte offset `p`, the K of layer `l` begins at
    `p + l * layout.layer_bytes`, and the V of this layer `layout.layer_bytes / 2` bytes later.
    """

    arena: Tensor
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Positions and pages of a step's tokens, for causal attention.

    query_start  int32 [S + 1]        tokens of sequence s are query_start[s]..query_start[s + 1]
    token_seq    int32 [T]            sequence of each token
    positions    int32 [T]            absolute position of each row in its sequence
    context_lens int32 [S]            tokens of the sequence in KV, including this step's tokens
    block_tables int64 [S, P]         byte offset in the arena of each page; entries past the
                                      context are undefined and must not be read
    max_query    int                  largest number of tokens of a sequence in the step
    max_context  int                  largest number in context_lens
    """

    query_start: Tensor
    token_seq: Tensor
    positions: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_query: int
    max_context: int


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention of one layer in a step. layer: index of the layer in KV pages.

    The row at position p sees positions max(0, p - window + 1)..p, or all up to p if `window` is
    None. scores = q k^T * scale, then softcap * tanh(scores / softcap) unless `softcap` is None.
    sinks: float32 [H]. In the softmax of head h, sinks[h] is one more score, for which V is zero.
    """

    batch: AttentionBatch
    kv: KVCacheView
    layer: int
    num_heads: int
    scale: float = 1.0
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Per-head RMS norm of q and k before rope (Qwen3, Gemma 3).

    Weights are float32 [D] and include the family's offset.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class ReplacedRows:
    """Rows of a table [V, K] as an adapter replaces them for rows first..end - 1 of the batch.

    ids: token ids of the rows, int32 [count], ascending. rows: the new rows, [count, K].
    """

    first: int
    end: int
    ids: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class AdapterTables:
    """Locations of each resident adapter's factors. Commands of a step (`ops.commands`) rewrite a
    slot in place.

    L is the number of layers, and P that of a layer's projections that adapters may touch.

    a_offset int64 [slots, L + 1, P]  byte offset of A in the arena, in the backend's
                                      `factor_layout`; of the embedding [V, rank], rank contiguous
    b_offset int64 [slots, L + 1, P]  byte offset of scaled B in the backend's `factor_layout`
    rank     int32 [slots, L + 1, P]  0 = the adapter does not touch this projection (offsets
                                      undefined)

    Entries [:, L, EMBEDDING] and [:, L, HEAD] belong to the embedding and the output matrix.

    replaced: rows of EMBEDDING and HEAD that the adapter replaces, by slot and module, on the host.
    Slots whose adapter replaces no rows are absent.
    """

    a_offset: Tensor
    b_offset: Tensor
    rank: Tensor
    replaced: dict[int, Mapping[int, TableRows]] = field(
        default_factory=dict[int, Mapping[int, TableRows]]
    )

    @classmethod
    def empty(cls, size: tuple[int, int, int], device: torch.device) -> AdapterTables:
        """Returns tables of the size [slots, L + 1, P] whose ranks are all 0."""
        a_offset, b_offset = torch.zeros((2, *size), dtype=torch.int64, device=device)
        return cls(a_offset, b_offset, torch.zeros(size, dtype=torch.int32, device=device))

    def replaces_rows(self, slots: NDArray[Any]) -> bool:
        """Returns whether an adapter in these slots has own rows of a table. slots: host array."""
        return bool(self.replaced) and not self.replaced.keys().isdisjoint(slots.tolist())


@dataclass(frozen=True, slots=True)
class LoRABatch:
    """Adapters of a step's tokens, as segments of tokens that share an adapter slot.

    segment_start int32 [N + 1]   tokens of segment n are segment_start[n]..segment_start[n + 1];
                                  the tokens after segment_start[N] are base only
    segment_slot  int32 [N]       adapter slot; slots may repeat
    replaced                      rows that the segments' adapters replace: rows of the embedding in
                                  a batch of input tokens, of the output matrix in a batch of
                                  sampled rows
    """

    arena: Tensor
    dtype: torch.dtype
    tables: AdapterTables
    segment_start: Tensor
    segment_slot: Tensor
    max_rank: int
    replaced: tuple[ReplacedRows, ...] = ()

    @property
    def outer_layer(self) -> int:
        """Index of the tables' last layer, which has the embedding and the output matrix."""
        return self.tables.rank.shape[1] - 1


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of one forward pass, built once per step. input_ids: token ids, int32 [T]. lora:
    adapters of the step's tokens, or None if no token has an adapter. sample_lora: adapters of the
    sampled rows, for the output matrix."""

    input_ids: Tensor
    attention: AttentionBatch
    kv: KVCacheView
    lora: LoRABatch | None
    sample_lora: LoRABatch | None = None


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """Linear layer whose output is one or more projections side by side.

    projections: indices on the `projection` axis of the adapter tables, in output column order.
    widths: number of output columns of each projection.
    """

    projections: tuple[int, ...]
    widths: tuple[int, ...]
    in_features: int

    @classmethod
    def of(cls, in_features: int, **widths: int) -> FusedLinear:
        """Returns the fused linear of the named projections, in the order given. widths: number of
        output columns by name of the projection."""
        projections = tuple(PROJECTIONS.index(name) for name in widths)
        return cls(projections, tuple(widths.values()), in_features)


class PackedLinear(Protocol):
    """Weight in the form that the backend's `linear` reads. Opaque except for these members."""

    in_features: int
    out_features: int
    num_bytes: int

    def placed(self, place: Callable[[Tensor], Tensor]) -> Self:
        """Returns the same weight with each tensor replaced by `place(tensor)`."""
        ...


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """Packed weight, and the projections in its output to which adapters are added."""

    weight: PackedLinear
    fused: FusedLinear


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm as in `Ops.rms_norm`. weight: float32 [K], including the model family's offset."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights and settings of one decoder layer, as `workers.layers.decoder_layer` uses them.

    layer: index of the layer in KV pages and adapter tables. rope, qk_norm: arguments of
    `Ops.rope_write_kv`. scale, window, softcap: see `LayerAttention`. post_attention_norm,
    post_mlp_norm: norms of a block's output before it is added to the residual (Gemma), if any.
    following_norm: first norm of the next layer, or the model's last norm. mlp_norm and
    following_norm are None if the next block reads the residual itself (OLMo). wide_qk_norm: norm
    over all heads of q, and of k, before rope (OLMo), with weights float32 [heads * D].
    """

    layer: int
    num_heads: int
    qkv: AdaptedLinear
    output: AdaptedLinear
    gate_up: AdaptedLinear
    down: AdaptedLinear
    rope: Tensor
    qk_norm: QKNorm | None
    scale: float
    window: int | None
    softcap: float | None
    activation: Activation
    post_attention_norm: Norm | None
    mlp_norm: Norm | None
    post_mlp_norm: Norm | None
    following_norm: Norm | None
    wide_qk_norm: QKNorm | None = None


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters for drawing one token from each of N rows of logits.

    temperature float32 [N]   0 = greedy, for which only bias and penalties matter
    top_k       int32 [N]     0 = off
    top_p       float32 [N]   1 = off
    min_p       float32 [N]   0 = off
    seed        int64 [N]     position int64 [N]   choice int64 [N]   the key of the random numbers
    presence, frequency float32 [N]   OpenAI penalties over generated tokens, 0 = off
    repetition  float32 [N]   over prompt and generated tokens, 1 = off
    token_buffer int32 [slots, max_model_len]; buffer_slot, prompt_len, total_len int32 [N]
                              the tokens that the penalties count
    bias_start int32 [N + 1], bias_ids int32 [B], bias_values float32 [B]
                              logit bias as ragged rows; -inf bans a token
    all_greedy, has_penalties, has_bias
                              host-side facts that let a backend skip work
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    choice: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    token_buffer: Tensor
    buffer_slot: Tensor
    prompt_len: Tensor
    total_len: Tensor
    bias_start: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    all_greedy: bool
    has_penalties: bool
    has_bias: bool


class DeviceEvent(Protocol):
    """Point in the work submitted to a device, like a CUDA event."""

    def synchronize(self) -> None:
        """Blocks until all work before the event is done."""
        ...

    def query(self) -> bool:
        """Returns whether all work before the event is done."""
        ...

    def wait(self) -> None:
        """Makes the device start later work of this thread only after the event. Does not block."""
        ...


class PassedEvent:
    """Event of a backend whose ops are synchronous. All work before the event is already done."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass


EVEN = range(2, sys.maxsize, 2)
"""Even head sizes, which rotary embedding can rotate."""


class HostOps:
    """Mixin that implements the device calls of a backend whose ops are synchronous."""

    compiles = False
    num_compiled = 0
    shares_tables = False
    keeps_blocks = False
    head_dims = EVEN

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return work

    def side_stream(self, name: StreamName) -> AbstractContextManager[None]:
        return nullcontext()

    def record_event(self) -> DeviceEvent:
        return PassedEvent()

    def table_linear(self: Ops, table: Tensor) -> PackedLinear:
        return self.pack_linear(table)


class Compute(Protocol):
    """Arithmetic of a decoder layer on a backend."""

    factor_layout: FactorLayout
    """Layout of the factors A and B of adapters, in memory and in adapter images."""
    shares_tables: bool
    """Whether the output projection can read the embedding table in place, so that a model with
    tied embeddings stores it once."""
    keeps_blocks: bool
    """Whether block-quantised matrices are packed as blocks rather than as bfloat16."""
    head_dims: range

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype: ...

    def pack_linear(self, *weights: Weight, bias: Tensor | None = None) -> PackedLinear:
        """Packs matrices [N, K], concatenated by rows, and their bias into one linear.

        Plain matrices have the serving dtype. Block-quantised matrices give the results of their
        bfloat16 form, bit for bit. The arguments may be freed afterwards.
        """
        ...

    def table_linear(self, table: Tensor) -> PackedLinear:
        """Returns an embedding table [V, K] as the output projection: the table itself if
        `shares_tables`, otherwise a copy that is packed like any other weight."""
        ...

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """Semantics: y = x W^T + bias.  Shape: x [T, K] -> [T, N].
        DType: activation, sums in float32.
        """
        ...

    def embed(self, ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        """Semantics: y[t] = table[ids[t]] * scale.
        Shape: ids int32 [T], table [V, K] -> [T, K].
        """
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """Semantics: with residual: residual += x in place, y = norm(residual); else y = norm(x).
        norm(v) = v / sqrt(mean(v^2) + eps) * weight.
        Shape: x, residual [T, K]; weight float32 [K], including the model family's offset."""
        ...

    def rope_write_kv(
        self, qkv: Tensor, rope: Tensor | None, at: LayerAttention, qk_norm: QKNorm | None = None
    ) -> None:
        """Semantics: norms q and k per head if `qk_norm` is given, rotates both (half-split pairs)
        if `rope` is given, writes k and v into their pages. Leaves the rotated q in its columns of
        qkv; the columns of k and v are undefined afterwards.
        Shape: qkv [T, (H + 2G) * D]; rope float32 [max positions, D], cosines then sines."""
        ...

    def paged_attention(self, qkv: Tensor, at: LayerAttention) -> Tensor:
        """Semantics: causal attention of each row over its sequence's pages, prefill and decode, as
        `LayerAttention` says. Query head h reads KV head h // (H / G).
        Shape: q is the first H * D columns of qkv [T, (H + 2G) * D] -> [T, H * D]. Sums in
        float32."""
        ...

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Semantics: act(gate) * up.  Shape: [T, 2 * I] (gate first) -> [T, I]."""
        ...

    def add_lora(
        self, y: Tensor, x: Tensor, fused: FusedLinear, layer: int, lora: LoRABatch
    ) -> None:
        """Semantics: for every segment and every projection of the fused linear with rank > 0:
        y[rows, columns] += (x[rows] A^T) B^T, partial sums in float32, y changed in place.
        Shape: x [T, K], y [T, sum(fused.widths)]. Rows outside the segments are untouched.
        """
        ...

    def add_embedding_lora(self, y: Tensor, ids: Tensor, lora: LoRABatch, scale: float) -> None:
        """Semantics: for every segment whose adapter has a rank > 0 for the embedding:
        y[t] += A[ids[t]] B^T * scale, sums in float32, y changed in place.
        Shape: ids int32 [T], y [T, K]. Rows outside the segments are untouched.
        """
        ...

    def row_products(self, x: Tensor, rows: Tensor) -> Tensor:
        """Semantics: y = x rows^T, for rows that an adapter replaces in the output matrix.
        Shape: x [T, K], rows [N, K] in the serving dtype -> [T, N]. Sums in float32.
        """
        ...


class Sampling(Protocol):
    """Sampling of tokens and log-probabilities from logits on a backend."""

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Semantics: bias, then penalties, then temperature, top-k, top-p, min-p (each applied to
        the tokens that the previous one kept), then argmax(logit / temperature + Gumbel noise). The
        noise is a pure function of (seed, position, choice, token id). Among equal tokens the
        smallest id wins. The result is -1 for a row with a NaN logit.
        Shape: logits float32 [N, V], may be changed -> int32 [N]."""
        ...

    def log_softmax_top(
        self, logits: Tensor, tokens: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns log-probabilities of the raw logits, which are not changed.
        Shape: logits float32 [N, V], tokens int32 [N] -> chosen float32 [N], top ids int32 [N,
        num_top], top values float32 [N, num_top], descending."""
        ...


class Device(Protocol):
    """Memory, events and captured work of a backend's device."""

    device: torch.device
    compiles: bool
    """Whether kernels are compiled at run time, when they are first launched in a new form."""

    @property
    def num_compiled(self) -> int:
        """Number of kernels that this process compiled or read from the cache folder."""
        ...

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Returns a function that repeats the work, if possible with less host overhead (CUDA
        graph). The function uses the same memory as the work, and returns the same tensor each
        time."""
        ...

    def side_stream(self, name: StreamName) -> AbstractContextManager[None]:
        """Returns a context whose work is submitted to the named stream. The work runs concurrently
        with the steps in flight, so it must not use their memory. Work of one stream runs in
        order."""
        ...

    def record_event(self) -> DeviceEvent:
        """Returns an event that follows the work submitted so far. Does not block."""
        ...


class Ops(Compute, Sampling, Device, Protocol):
    """Backend for all ops. It keeps only scratch memory, and no references to arguments."""

    name: str


class LayerStack(Protocol):
    """All layers of a model, bound to a backend."""

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """Runs all layers. x [T, K] is `residual` [T, K] after the first layer's norm. Changes
        `residual` in place. Returns the result of the last layer's `following_norm`, [T, K]."""
        ...


@runtime_checkable
class StacksLayers(Protocol):
    """Optional interface of a backend that runs all layers in one call. The results are
    bit-identical to those of the backend's single ops."""

    def bind_layers(self, layers: list[LayerWeights]) -> LayerStack:
        """Binds the layers to the backend. The result keeps references to their tensors."""
        ...
