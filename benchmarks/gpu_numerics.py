"""Compares the `cuda` backend at the shapes of a served model with float32 torch on the same
device.

Every case computes one op, or a few together, on random inputs, and compares the results row by
row, so that a single wrong row among thousands is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from benchmarks.shaped_model import LLAMA_8B, TINY, Batch, Shape, ShapedModel
from memory.page_key import pages_of
from ops.base import (
    PAGE_TOKENS,
    Activation,
    AdapterTables,
    AttentionBatch,
    FusedLinear,
    KVCacheView,
    KVLayout,
    LayerAttention,
    LoRABatch,
    Ops,
    QKNorm,
    SamplingBatch,
)
from ops.reference import ReferenceOps

Results = tuple[Tensor, ...]
Compare = Callable[[Tensor, Tensor], float]

MAX_ERRORS = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""Maximum error of a row relative to its norm, by the dtype of activations. bfloat16 rounds with a
relative error of 0.002, and an op rounds several times."""
MAX_DIFFERENT = 0.02
"""Maximum share of rows whose sampled token differs from the reference's. If two tokens are almost
equally likely, a rounding difference may change which one is sampled."""
LAYER = 1


class Case(NamedTuple):
    """Comparison of `run` with `expected`. Both return the same number of tensors with the same
    shapes. `run` is called first, because `expected` may overwrite its inputs."""

    name: str
    run: Callable[[], Results]
    expected: Callable[[], Results]
    max_error: float
    compare: Compare


class Heads(NamedTuple):
    query: int
    kv: int
    dim: int


class Sizes(NamedTuple):
    """Sizes of the cases. `shape` has two layers. `decode` has pairs of the number of sequences and
    the tokens of each. `prefill` has pairs of the tokens of a chunk and the position after it.
    `mixed` has, for each sequence of one step, the number of new tokens and of tokens before them.
    `lora` has rows, adapters and their ranks. `far_bytes` is the size of a memory of which only the
    end is used."""

    shape: Shape
    dtype: torch.dtype
    heads: tuple[Heads, ...]
    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int], ...]
    mixed: tuple[tuple[int, int], ...]
    window: int
    lora: tuple[tuple[int, int, tuple[int, ...]], ...]
    num_rows: int
    far_bytes: int


FULL = Sizes(
    shape=replace(LLAMA_8B, layers=2),
    dtype=torch.bfloat16,
    heads=(Heads(32, 8, 128), Heads(32, 8, 64), Heads(16, 8, 256)),
    decode=((1, 1024), (32, 1024), (256, 1024), (1, 33_000), (8, 33_000)),
    prefill=((512, 512), (2048, 2048), (512, 4096)),
    mixed=((1, 1023), (200, 0), (1, 9000), (3, 700), (1, 0), (33, 32), (900, 100)),
    window=1024,
    lora=(
        (32, 32, (16,)),
        (32, 8, (8, 16, 64)),
        (256, 8, (16,)),
        (256, 8, (8, 64)),
        (2048, 4, (16,)),
        (2048, 4, (8, 64)),
        (300, 3, (256,)),
    ),
    num_rows=64,
    far_bytes=40 << 30,
)
SMALL = Sizes(
    shape=replace(TINY, layers=2),
    dtype=torch.float32,
    heads=(Heads(2, 1, 16), Heads(3, 3, 20)),
    decode=((2, 40),),
    prefill=((5, 21),),
    mixed=((1, 300), (20, 0), (3, 9)),
    window=13,
    lora=((2, 2, (4,)), (9, 2, (4, 2)), (70, 1, (20,))),
    num_rows=4,
    far_bytes=1 << 20,
)
"""Sizes for Triton's interpreter, which is slow."""


def rows(case: Case) -> Iterator[dict[str, Any]]:
    pairs = zip(case.run(), case.expected(), strict=True)
    errors = [case.compare(result, expected) for result, expected in pairs]
    # A comparison with NaN is false, so NaN counts as failed.
    passed = all(error <= case.max_error for error in errors)
    yield {"case": case.name, "errors": errors, "max_error": case.max_error, "passed": passed}


def worst_row(result: Tensor, expected: Tensor) -> float:
    """Returns the largest relative error of a row, in the Euclidean norm."""
    result, expected = (each.reshape(len(each), -1).float() for each in (result, expected))
    size = expected.norm(dim=1).clamp_min(1e-6)
    return float(((result - expected).norm(dim=1) / size).max())


def share_different(result: Tensor, expected: Tensor) -> float:
    """Returns the share of rows that differ."""
    same = (result == expected).reshape(len(result), -1).all(dim=1)
    return 1.0 - float(same.float().mean())


class Cases:
    def __init__(self, ops: Ops, sizes: Sizes) -> None:
        self.ops, self.sizes = ops, sizes
        self.reference = ReferenceOps(ops.device)
        self.parts: dict[str, Callable[[], Iterator[Case]]] = {
            "pointwise": self.pointwise,
            **{
                f"attention, head size {heads.dim}": partial(self.attention, heads)
                for heads in sizes.heads
            },
            "lora": self.lora,
            "sampling": self.sampling,
            "far offsets": self.far,
            "two layers": self.layers,
        }

    def _random(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.ops.device).to(self.sizes.dtype)

    def _case(self, name: str, run: Callable[[], Results], expected: Callable[[], Results]) -> Case:
        return Case(name, run, expected, MAX_ERRORS[self.sizes.dtype], worst_row)

    def pointwise(self) -> Iterator[Case]:
        ops, reference, shape = self.ops, self.reference, self.sizes.shape
        x, residual = self._random(self.sizes.num_rows, shape.hidden), self._random(1, shape.hidden)
        residual = residual.repeat(len(x), 1)
        weight = torch.rand(shape.hidden, device=ops.device) + 0.5

        def norms(ops: Ops, x: Tensor, residual: Tensor) -> Results:
            return ops.rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5, residual), residual

        yield self._case(
            "rms_norm",
            lambda: norms(ops, x, residual.clone()),
            lambda: norms(reference, x.float(), residual.float()),
        )
        gates = self._random(self.sizes.num_rows, 2 * shape.inner)
        for activation in get_args(Activation):
            yield self._case(
                activation,
                lambda: (ops.gated_activation(gates, activation),),  # noqa: B023
                lambda: (reference.gated_activation(gates.float(), activation),),  # noqa: B023
            )
        table = self._random(shape.vocab, shape.hidden)
        ids = torch.arange(self.sizes.num_rows, dtype=torch.int32) * 7919 % shape.vocab
        ids = ids.to(ops.device)
        yield self._case(
            "embed",
            lambda: (ops.embed(ids, table, 1.5),),
            lambda: (reference.embed(ids, table, 1.5),),
        )
        linear, exact = ops.pack_linear(table), reference.pack_linear(table)
        yield self._case(
            "linear",
            lambda: (ops.linear(x, linear),),
            lambda: (reference.linear(x.float(), exact),),
        )

    def attention(self, heads: Heads) -> Iterator[Case]:
        """Yields cases that rotate queries and keys, write K and V, and compute attention. They
        compare the rotated queries, the keys and values in their pages, and the result."""
        sizes = self.sizes
        for num_seqs, length in sizes.decode:
            step = [(1, length - 1)] * num_seqs
            yield self._attend(f"decode, {num_seqs} x {length}", heads, step)
        for num_tokens, end in sizes.prefill:
            name = f"prefill, {num_tokens} tokens up to {end}"
            yield self._attend(name, heads, [(num_tokens, end - num_tokens)])
        yield self._attend("mixed", heads, list(sizes.mixed))
        yield self._attend(
            "mixed, window, softcap, q and k norm", heads, list(sizes.mixed), is_plain=False
        )

    def _attend(
        self,
        name: str,
        heads: Heads,
        step: list[tuple[int, int]],
        *,
        is_plain: bool = True,
        memory: Tensor | None = None,
    ) -> Case:
        """Returns a case for one step. `step` has the number of new tokens of each sequence, and of
        tokens before them. The pages are placed at the end of `memory` (uint8), or in new memory if
        it is None."""
        sizes, device = self.sizes, self.ops.device
        layout = KVLayout(LAYER + 1, heads.kv, heads.dim, sizes.dtype)
        lengths = [new + before for new, before in step]
        num_pages = [pages_of(length) for length in lengths]
        num_bytes = sum(num_pages) * layout.page_bytes
        if memory is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        first = (memory.nbytes - num_bytes) // 64 * 64
        memory[first : first + num_bytes].view(sizes.dtype).normal_()
        pages = first + torch.randperm(sum(num_pages)) * layout.page_bytes
        tables = torch.zeros(len(step), max(num_pages), dtype=torch.int64)
        for seq, own in enumerate(pages.split(num_pages)):
            tables[seq, : len(own)] = own
        batch = attention_batch(step, tables, device)
        kv = KVCacheView(memory, layout)
        qkv = self._random(sum(new for new, _ in step), (heads.query + 2 * heads.kv) * heads.dim)
        rope = rope_table(max(lengths), heads.dim).to(device)
        weights = torch.rand(2, heads.dim, device=device)
        norm = None if is_plain else QKNorm(weights[0], weights[1], 1e-6)
        options = {} if is_plain else {"window": sizes.window, "softcap": 30.0}

        at = LayerAttention(batch, kv, LAYER, heads.query, heads.dim**-0.5, **options)

        def compute(ops: Ops, x: Tensor) -> Results:
            ops.rope_write_kv(x, rope, at, norm)
            out = ops.paged_attention(x, at)
            return out, x[:, : heads.query * heads.dim], written(kv, batch)

        return self._case(
            name,
            lambda: compute(self.ops, qkv.clone()),
            lambda: compute(self.reference, qkv.float()),
        )

    def lora(self) -> Iterator[Case]:
        """Yields cases of LoRA by row, and by tiles of 16 and 64 rows. The last rows have no
        adapter."""
        model = ShapedModel(self.ops, replace(self.sizes.shape, vocab=1), self.sizes.dtype, 1)
        for num_rows, count, ranks in self.sizes.lora:
            lora = model.assign(model.adapters(count, ranks), num_rows, count)
            for linear, fused in self.sizes.shape.fused_linears.items():
                name = f"{linear}, {num_rows} rows, {count} adapters of ranks {list(ranks)}"
                yield self._add_lora(name, fused, num_rows + 3, lora, lora)

    def _add_lora(
        self,
        name: str,
        fused: FusedLinear,
        num_rows: int,
        lora: LoRABatch,
        exact: LoRABatch,
    ) -> Case:
        x, y = self._random(num_rows, fused.in_features), self._random(num_rows, sum(fused.widths))
        # Scaled to the size of the added values, so that an error in either part is visible.
        y *= 0.1

        def add(ops: Ops, y: Tensor, x: Tensor, lora: LoRABatch) -> Results:
            ops.add_lora(y, x, fused, LAYER, lora)
            return (y,)

        return self._case(
            name,
            lambda: add(self.ops, y.clone(), x, lora),
            lambda: add(self.reference, y.float(), x.float(), exact),
        )

    def sampling(self) -> Iterator[Case]:
        """Yields cases of sampling. The backend must sample the reference's tokens, because both
        use the same noise. The last row contains a NaN."""
        count, vocab, device = self.sizes.num_rows, self.sizes.shape.vocab, self.ops.device
        logits = torch.randn(count, vocab, device=device) * 3
        for name, changes in SAMPLERS.items():
            batch = sampling_batch(count, vocab, device, changes)
            broken = logits.clone()
            broken[-1, vocab // 2] = float("nan")
            yield Case(
                name,
                lambda: (self.ops.sample(broken.clone(), batch),),  # noqa: B023
                lambda: (self.reference.sample(broken.clone(), batch),),  # noqa: B023
                MAX_DIFFERENT,
                share_different,
            )
        tokens = (torch.arange(count) % vocab).int().to(device)

        def score(ops: Ops) -> Results:
            chosen, ids, values = ops.log_softmax_top(logits, tokens, min(16, vocab))
            return chosen, logits.gather(1, ids.long()), values

        yield Case(
            "log_softmax_top",
            lambda: score(self.ops),
            lambda: score(self.reference),
            1e-5,
            worst_row,
        )

    def far(self) -> Iterator[Case]:
        """Yields cases whose KV pages and LoRA factors all have offsets above 2^31 elements."""
        sizes, device = self.sizes, self.ops.device
        memory = torch.empty(sizes.far_bytes, dtype=torch.uint8, device=device)
        heads = sizes.heads[0]
        step = [(1, sizes.window - 1), (1, 5), (sizes.num_rows, 70)]
        yield self._attend("attention", heads, step, memory=memory)
        model = ShapedModel(self.ops, replace(sizes.shape, vocab=1), sizes.dtype, 1)
        near = model.assign(model.adapters(2, (4,)), sizes.num_rows, 2)
        first = (memory.nbytes - near.arena.nbytes) // 64 * 64
        memory[first : first + near.arena.nbytes] = near.arena
        tables = near.tables
        moved = AdapterTables(tables.a_offset + first, tables.b_offset + first, tables.rank)
        lora = replace(near, arena=memory, tables=moved)
        fused = sizes.shape.fused_linears["gate_up"]
        yield self._add_lora("add_lora", fused, sizes.num_rows, lora, near)

    def layers(self) -> Iterator[Case]:
        """Yields cases of a whole decode step with adapters. The first compares it with the
        reference. The second replays a graph with other inputs than at its capture, and the result
        must equal the eager step bit by bit."""
        sizes, device = self.sizes, self.ops.device
        num_seqs, length = sizes.decode[-1 if sizes is SMALL else 1]
        model = ShapedModel(self.ops, sizes.shape, sizes.dtype, length + 1)
        exact_model = ShapedModel(self.reference, sizes.shape, sizes.dtype, length + 1)
        attention, kv = model.cache(num_seqs, length)(1, length)
        count = min(8, num_seqs)
        lora = model.assign(model.adapters(count, (16, 8)), num_seqs, count)
        ids = torch.arange(num_seqs, dtype=torch.int32).to(device) % sizes.shape.vocab
        batch = Batch(ids, attention, kv, lora)
        yield self._case(
            "forward",
            lambda: (model.forward(batch),),
            lambda: (exact_model.forward(batch),),
        )._replace(max_error=4 * MAX_ERRORS[sizes.dtype])
        replay = self.ops.capture(partial(model.forward, batch))
        ids.copy_(ids.flip(0))
        lora.segment_slot.copy_(lora.segment_slot.flip(0))
        yield Case(
            "graph",
            lambda: (replay().clone(),),
            lambda: (model.forward(batch),),
            0.0,
            share_different,
        )


SAMPLERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.2, top-k 50": {"temperature": 0.2, "top_k": 50},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "top-p 0.95, min-p 0.02": {"temperature": 0.7, "top_p": 0.95, "min_p": 0.02},
    "penalties and bias": {"presence": 0.5, "frequency": 0.25, "repetition": 1.2, "bias": 4.0},
}


def sampling_batch(
    count: int, vocab: int, device: torch.device, changes: dict[str, float]
) -> SamplingBatch:
    """Returns a batch whose rows differ only in their seeds and histories. `changes` has values of
    the parameters by name. Its `bias` is added to three tokens of each row."""

    def full(name: str, default: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((count,), changes.get(name, default), dtype=dtype, device=device)

    penalties = ("presence", "frequency", "repetition")
    bias_ids = (torch.arange(3 * count) * 31 % vocab).int().to(device)
    history = (torch.arange(count * 40).view(count, 40) * 13 % vocab).int().to(device)
    return SamplingBatch(
        temperature=full("temperature", 1.0),
        top_k=full("top_k", 0, torch.int32),
        top_p=full("top_p", 1.0),
        min_p=full("min_p", 0.0),
        seed=torch.arange(count).to(device),
        position=full("position", 11, torch.int64),
        choice=full("choice", 0, torch.int64),
        presence=full("presence", 0.0),
        frequency=full("frequency", 0.0),
        repetition=full("repetition", 1.0),
        token_buffer=history,
        buffer_slot=torch.arange(count).int().to(device),
        prompt_len=full("prompt_len", 20, torch.int32),
        total_len=full("total_len", 40, torch.int32),
        bias_start=(torch.arange(count + 1) * 3).int().to(device),
        bias_ids=bias_ids,
        bias_values=torch.full((3 * count,), changes.get("bias", 0.0), device=device),
        all_greedy=changes.get("temperature") == 0.0,
        has_penalties=any(name in changes for name in penalties),
        has_bias="bias" in changes,
    )


def attention_batch(
    step: list[tuple[int, int]], tables: Tensor, device: torch.device
) -> AttentionBatch:
    """Returns the batch of a step. `step` has the number of new tokens of each sequence, and of
    tokens before them."""
    counts, before = (torch.tensor(column) for column in zip(*step, strict=True))
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    token_seq = torch.arange(len(step)).repeat_interleave(counts)
    positions = torch.arange(int(starts[-1])) - starts[token_seq] + before[token_seq]
    lengths = counts + before
    return AttentionBatch(
        query_start=starts.int().to(device),
        token_seq=token_seq.int().to(device),
        positions=positions.int().to(device),
        context_lens=lengths.int().to(device),
        block_tables=tables.to(device),
        max_query=int(counts.max()),
        max_context=int(lengths.max()),
    )


def rope_table(num_positions: int, dim: int) -> Tensor:
    half = dim // 2
    angles = torch.arange(num_positions)[:, None] * 10000.0 ** -(torch.arange(half) / half)
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


def written(kv: KVCacheView, batch: AttentionBatch) -> Tensor:
    """Returns a copy of the keys and values of a step's tokens, [T, 2, G, D], from their pages."""
    layout, positions = kv.layout, batch.positions.long()
    page = batch.block_tables[batch.token_seq.long(), positions // PAGE_TOKENS]
    first = (page + LAYER * layout.layer_bytes) // layout.dtype.itemsize
    first += positions % PAGE_TOKENS * layout.head_dim
    head = torch.arange(2 * layout.num_kv_heads, device=first.device)
    lane = torch.arange(layout.head_dim, device=first.device)
    at = first[:, None, None] + head[:, None] * (PAGE_TOKENS * layout.head_dim) + lane
    return kv.arena.view(layout.dtype)[at].unflatten(1, (2, layout.num_kv_heads))
