"""Drives a decoder over scattered pages of one arena: several sequences at once, with adapters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from adapters.pool.factors import Factors
from adapters.pool.lora import packed_factors
from ops.base import (
    EMBEDDING,
    HEAD,
    PAGE_TOKENS,
    AdapterTables,
    AttentionBatch,
    ForwardBatch,
    KVCacheView,
    LoRABatch,
    Ops,
)
from ops.commands import TableRows
from tests.adapters.files import listed
from workers.layers.table_rows import with_rows
from workers.models.loading import LoadedModel

ADAPTER_BYTES = 1 << 21
MAX_SLOTS = 5


@dataclass
class Stream:
    """One sequence; slot -1 is the bare base."""

    slot: int = -1
    length: int = 0
    pages: list[int] = field(default_factory=list)


class PagedModel:
    """Pages are handed out in a shuffled order, so that no sequence's pages lie together."""

    def __init__(self, model: LoadedModel, ops: Ops, num_pages: int = 64) -> None:
        self.model, self.ops = model, ops
        page_bytes = model.plan.kv_layout.page_bytes
        # In front lies the page of padded rows.
        self.pages_start = -(-(page_bytes + ADAPTER_BYTES) // 64) * 64
        self.arena = torch.full(
            (self.pages_start + num_pages * page_bytes,), 0xFF, dtype=torch.uint8
        )
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(7))
        self.free = [self.pages_start + int(page) * page_bytes for page in order]
        modules = model.plan.shape
        size = MAX_SLOTS, modules.num_layers + 1, len(modules.projections)
        self.tables = AdapterTables.empty(size, self.arena.device)
        self.end = page_bytes

    def unload_adapters(self) -> None:
        self.end = 0
        self.tables.rank.zero_()
        self.tables.replaced.clear()

    def load_adapter(self, slot: int, folder: Path) -> None:
        """Reads an adapter as peft saved it."""
        shape = self.model.plan.shape
        factors = Factors(listed(folder, shape), shape)
        for layer in range(shape.num_layers + 1):
            for projection, name in enumerate(shape.modules(layer)):
                if (found := factors.read(layer, projection)) is None:
                    continue
                dtype = self.model.plan.kv_layout.dtype
                a, b = packed_factors(name, *found, self.ops.factor_layout, dtype)
                self.tables.a_offset[slot, layer, projection] = self._write(a)
                self.tables.b_offset[slot, layer, projection] = self._write(b)
                self.tables.rank[slot, layer, projection] = len(found[0])
        for module in (EMBEDDING, HEAD):
            if (found := factors.read_rows(module, 0, shape.vocab_size)) is not None:
                ids, rows = found
                at = TableRows(
                    len(ids), shape.hidden_size, self._write(ids, torch.int32), self._write(rows)
                )
                self.tables.replaced.setdefault(slot, {})[module] = at

    def _write(self, matrix: Tensor, dtype: torch.dtype | None = None) -> int:
        raw = matrix.to(dtype or self.model.plan.kv_layout.dtype).flatten().view(torch.uint8)
        start, self.end = self.end, self.end + (-(-len(raw) // 64) * 64)
        assert self.end <= self.pages_start
        self.arena[start : start + len(raw)] = raw
        return start

    def step(self, work: list[tuple[Stream, list[int]]]) -> list[Tensor]:
        """Computes the next tokens of each stream, adapters first; logits [n, V] of each."""
        tables = []
        for stream, tokens in work:
            while len(stream.pages) * PAGE_TOKENS < stream.length + len(tokens):
                stream.pages.append(self.free.pop())
            tables.append(stream.pages)
        counts = torch.tensor([len(tokens) for _, tokens in work])
        query_start = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        positions = [s.length + i for s, tokens in work for i in range(len(tokens))]
        contexts = [s.length + len(tokens) for s, tokens in work]
        block_tables = torch.full((len(work), max(map(len, tables))), -(1 << 40))
        for row, pages in enumerate(tables):
            block_tables[row, : len(pages)] = torch.tensor(pages)
        batch = ForwardBatch(
            input_ids=torch.tensor([t for _, tokens in work for t in tokens], dtype=torch.int32),
            attention=AttentionBatch(
                query_start=query_start,
                token_seq=torch.repeat_interleave(torch.arange(len(work)), counts).int(),
                positions=torch.tensor(positions, dtype=torch.int32),
                context_lens=torch.tensor(contexts, dtype=torch.int32),
                block_tables=block_tables,
                max_query=int(counts.max()),
                max_context=max(contexts),
            ),
            kv=KVCacheView(self.arena, self.model.plan.kv_layout),
            lora=self._lora([stream.slot for stream, _ in work], query_start),
        )
        # Every row is sampled, so the segments of the samples are those of the tokens.
        batch = replace(batch, sample_lora=batch.lora)
        if batch.lora is not None:
            starts = batch.lora.segment_start.numpy()
            batch = with_rows(batch, starts, starts, batch.lora.segment_slot.numpy())
        hidden = self.model.forward(batch)
        logits = self.model.logits(hidden, lora=batch.sample_lora)
        for (stream, _), context in zip(work, contexts, strict=True):
            stream.length = context
        return list(logits.split(counts.tolist()))

    def _lora(self, slots: list[int], query_start: Tensor) -> LoRABatch | None:
        used = [slot for slot in slots if slot >= 0]
        assert slots[: len(used)] == used, "adapter streams first"
        if not used:
            return None
        return LoRABatch(
            arena=self.arena,
            dtype=self.model.plan.kv_layout.dtype,
            tables=self.tables,
            segment_start=query_start[: len(used) + 1].contiguous(),
            segment_slot=torch.tensor(used, dtype=torch.int32),
            max_rank=int(self.tables.rank.max()),
        )

    def generate(self, stream: Stream, prompt: list[int], num_tokens: int) -> list[int]:
        """Greedy tokens after the prompt."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            (logits,) = self.step([(stream, tokens[stream.length :])])
            tokens.append(int(logits[-1].argmax()))
        return tokens[len(prompt) :]
