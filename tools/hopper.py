"""`python -m tools.hopper [float32]`: compiles the kernels of a step of a Llama-3-8B-shaped model
for sm_90, and prints the resources that each kernel needs.

No GPU is needed, because Triton includes an assembler and `tools.triton_driver` launches nothing.
Each line of output is a JSON object for one kernel: its name, bytes of shared memory per program,
registers and bytes of stack per thread, number of 16-byte loads from memory, and number of copies
to shared memory that may be in flight while the kernel computes.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from triton import knobs

from ops.base import (
    PAGE_TOKENS,
    AdapterTables,
    AttentionBatch,
    FusedLinear,
    KVCacheView,
    KVLayout,
    LayerAttention,
    LoRABatch,
    QKNorm,
    SamplingBatch,
)
from ops.cuda import CudaOps
from tools.triton_driver import SHARED_BYTES, run_nothing

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB = 4096, 32, 8, 128, 14336, 128256


def report(name: str, binary: bytes, shared: int) -> None:
    print(json.dumps({"name": name, "shared": shared, **_resources(binary)}))


def _resources(binary: bytes) -> dict[str, int]:
    """Returns a kernel's registers and bytes of stack per thread, the number of its 16-byte loads,
    and the largest number of groups of copies that a wait leaves in flight. The result is cached in
    Triton's cache folder, because disassembling the kernel takes a second."""
    kept = Path(knobs.cache.dir, f"{hashlib.sha256(binary).hexdigest()}.resources.json")
    if kept.exists():
        return json.loads(kept.read_text())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "--dump-sass", file.name]
        dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", dump)
    assert found is not None, dump
    wide = len(re.findall(r"LDG\.E\.128|LDGSTS\.E\S*\.128", dump))
    waits = [int(count, 16) for count in re.findall(r"DEPBAR\.LE SB0, 0x([0-9a-f]+)", dump)]
    resources = {"registers": int(found[1]), "stack": int(found[2]), "wide_loads": wide}
    resources["in_flight"] = max(waits, default=0)
    kept.write_text(json.dumps(resources))
    return resources


def attend(ops: CudaOps, dtype: torch.dtype, seqs: int, rows: int, context: int) -> None:
    layout = KVLayout(32, KV_HEADS, DIM, dtype)
    total = seqs * rows
    batch = AttentionBatch(
        torch.arange(seqs + 1).int() * rows,
        torch.arange(seqs).int().repeat_interleave(rows),
        torch.zeros(total).int(),
        torch.full((seqs,), context).int(),
        torch.zeros(seqs, context // PAGE_TOKENS, dtype=torch.int64),
        rows,
        context,
    )
    kv = KVCacheView(torch.zeros(layout.page_bytes, dtype=torch.uint8), layout)
    qkv = torch.empty(total, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype)
    norm = QKNorm(torch.ones(DIM), torch.ones(DIM), 1e-6)
    at = LayerAttention(batch, kv, 16, HEADS, scale=0.1)
    for chosen in (None, norm):
        ops.rope_write_kv(qkv, torch.zeros(8, DIM), at, chosen)
    ops.paged_attention(qkv, at)
    ops.paged_attention(qkv, replace(at, window=1024, softcap=50.0))


def add_lora(
    ops: CudaOps,
    dtype: torch.dtype,
    rows: int,
    segments: int,
    max_rank: int,
    layer: int = 16,
) -> None:
    offsets = torch.zeros(64, 32, 7, dtype=torch.int64)
    tables = AdapterTables(offsets, offsets, torch.zeros(64, 32, 7, dtype=torch.int32))
    lora = LoRABatch(
        torch.zeros(1 << 16, dtype=torch.uint8),
        dtype,
        tables,
        torch.zeros(segments + 1).int(),
        torch.zeros(segments).int(),
        max_rank,
    )
    fused = FusedLinear((4, 5), (INNER, INNER), HIDDEN)
    y = torch.empty(rows, sum(fused.widths), dtype=dtype)
    ops.add_lora(y, torch.empty(rows, HIDDEN, dtype=dtype), fused, layer, lora)


def sample(ops: CudaOps, rows: int, num_top: int = 16) -> None:
    floats, ints = torch.zeros(rows), torch.zeros(rows, dtype=torch.int32)
    longs = torch.zeros(rows, dtype=torch.int64)
    batch = SamplingBatch(
        *(floats, ints, floats, floats, longs, longs, longs, floats, floats, floats),
        *(torch.zeros(rows, 8192, dtype=torch.int32), ints, ints, ints),
        *(torch.zeros(rows + 1, dtype=torch.int32), ints, floats, False, True, True),
    )
    logits = torch.empty(rows, VOCAB)
    ops.sample(logits, batch)
    ops.log_softmax_top(logits, ints, num_top)


def main() -> None:
    run_nothing(report)
    ops = CudaOps(torch.device("cpu"))
    ops.overlaps, ops.shared_bytes = True, SHARED_BYTES
    for dtype in [torch.float32] if "float32" in sys.argv else [torch.bfloat16]:
        x, weight = torch.zeros(16, HIDDEN, dtype=dtype), torch.ones(HIDDEN)
        ops.rms_norm(x, weight, 1e-5)
        ops.rms_norm(x, weight, 1e-5, x)
        ops.gated_activation(torch.zeros(16, 2 * INNER, dtype=dtype), "silu")
        ops.gated_activation(torch.zeros(16, 2 * INNER, dtype=dtype), "gelu_tanh")
        ops.embed(torch.zeros(16, dtype=torch.int32), x, 1.5)
        attend(ops, dtype, 4, 1, 4096)
        attend(ops, dtype, 256, 1, 1024)
        attend(ops, dtype, 1, 512, 4096)
        for rows, segments, max_rank in ((32, 32, 16), (32, 4, 16), (32, 32, 64), (512, 4, 64)):
            add_lora(ops, dtype, rows, segments, max_rank)
    sample(ops, 4)


if __name__ == "__main__":
    main()
