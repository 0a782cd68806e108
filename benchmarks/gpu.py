"""`python -m benchmarks.gpu --out gpu.json`: what the cuda backend does on this GPU, in 8 minutes.

Everything is set against what the device did in the same run: a copy, a matrix product, a pinned
transfer. It needs torch, triton and this checkout; for the part of the engine msgspec and
safetensors too. Not here: loads of adapters and swaps under traffic.
`--tiny` runs every part once at toy sizes, on the CPU under TRITON_INTERPRET=1 if need be.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.gpu_adapters import adapter_rows
from benchmarks.gpu_baseline import step_rows
from benchmarks.gpu_ops import CONTEXT, beside_rows, op_rows, sweep
from benchmarks.gpu_swap import swap_rows
from benchmarks.gpu_timing import Bench
from benchmarks.shaped_model import LLAMA_8B, QWEN_600M, TINY, Batch, Shape, ShapedModel
from ops.base import PAGE_TOKENS
from ops.cuda import CudaOps


@triton.jit
def _nothing(x):
    tl.store(x, 0.0)


def describe(device: torch.device) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["triton"] = triton.__version__
    if device.type == "cpu":
        return {"device": "cpu, interpreted", **versions}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "cuda": torch.version.cuda,
        **versions,
    }


def ceilings(bench: Bench) -> Iterator[dict[str, Any]]:
    """What the device does at best: everything else is a share of this."""
    size = 1 << (12 if bench.tiny else 31)
    source = torch.empty(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy = 2 * size / bench.seconds(lambda: target.copy_(source))
    side = 64 if bench.tiny else 8192
    a = torch.randn(side, side, dtype=torch.bfloat16, device=bench.device)
    b = torch.randn_like(a)
    product = 2 * side**3 / bench.seconds(lambda: a @ b)
    x = torch.zeros(1, device=bench.device)

    def launches() -> None:
        for _ in range(2 if bench.tiny else 200):
            _nothing[(1,)](x)

    launch = bench.seconds(launches) / (2 if bench.tiny else 200)
    bench.results["copy_bytes_per_second"] = copy
    yield {"copy_TB_s": copy / 1e12, "bf16_TFLOP_s": product / 1e12, "launch_us": launch * 1e6}


def transfers(bench: Bench) -> Iterator[dict[str, Any]]:
    """From pinned memory: a page, an adapter of rank 16, and 1 GiB, the rate that swaps are set
    against."""
    sizes = {"page": 2 << 20, "adapter r16": 84 << 20, "1 GiB of weights": 1 << 30}
    pinned = bench.device.type == "cuda"
    for name, size in {"tiny": 4096}.items() if bench.tiny else sizes.items():
        host = torch.ones(size, dtype=torch.uint8)
        begin = time.perf_counter()
        host = host.pin_memory() if pinned else host
        pinning = time.perf_counter() - begin
        there = torch.empty(size, dtype=torch.uint8, device=bench.device)
        took = bench.seconds(
            lambda host=host, there=there: there.copy_(host, non_blocking=True), captured=False
        )
        rate = size / took
        bench.results["transfer_bytes_per_second"] = rate
        yield {"what": name, "ms": took * 1e3, "GB_s": rate / 1e9, "pinning_ms": pinning * 1e3}


def baseline(bench: Bench, shape: Shape) -> Iterator[dict[str, Any]]:
    """transformers + peft, where they are installed."""
    rows, prompt, count, steps = ((2,), 8, 2, 4) if bench.tiny else ((1, 32), CONTEXT, 8, 32)
    try:
        yield from step_rows(shape, bench.device, rows, prompt, count, steps)
    except ImportError as error:
        yield {"left_out": str(error)}


def engine(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """Tokens a second through the engine, and the gap between its steps."""
    try:
        from benchmarks.gpu_engine import engine_rows
    except ImportError as error:
        yield {"left_out": str(error)}
        return
    yield from engine_rows(bench, model)


def decode(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """A captured step of one token a sequence against bytes / copy bandwidth; LoRA against base."""
    shape, copy = model.shape, bench.results["copy_bytes_per_second"]
    context = 32 if bench.tiny else CONTEXT
    for rows in (2,) if bench.tiny else (1, 8, 32, 128, 256):
        attention, kv = model.cache(rows, context)(1, context)
        ids = torch.arange(rows, dtype=torch.int32, device=bench.device)
        base_bytes = 2 * shape.linear_parameters
        base_bytes += rows * context * kv.layout.page_bytes // PAGE_TOKENS
        base = bench.seconds(partial(model.forward, Batch(ids, attention, kv, None)))
        yield _step_row(shape, rows, 0, "", base_bytes, base, base, copy)
        for count in (2,) if bench.tiny else (1, 8, 32, 128):
            if count > rows:
                break
            mixes = [(8,)] if bench.tiny else [(8,), (16,), (64,), (8, 16, 32, 64)]
            for ranks in mixes:
                lora = model.assign(model.adapters(count, ranks), rows, count)
                total = sum(ranks[n % len(ranks)] for n in range(count))
                num_bytes = base_bytes + total * shape.rank_elements * 2
                took = bench.seconds(partial(model.forward, Batch(ids, attention, kv, lora)))
                name = "/".join(map(str, ranks))
                yield _step_row(shape, rows, count, name, num_bytes, took, base, copy)


def prefill(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """One prompt, eager, the head on every row: TFLOP/s of linears and attention."""
    shape = model.shape
    for rows in (18,) if bench.tiny else (512, 2048, 8192):
        attention, kv = model.cache(1, rows)(rows, rows)
        ids = torch.zeros(rows, dtype=torch.int32, device=bench.device)
        flops = 2.0 * rows * shape.linear_parameters
        flops += 2.0 * shape.layers * shape.heads * shape.dim * rows * rows
        adapters = model.adapters(1, (16,))
        for lora in (None, model.assign(adapters, rows, 1)):
            batch = Batch(ids, attention, kv, lora)
            took = bench.seconds(lambda b=batch: model.forward(b), captured=False, most=3)
            yield {
                "model": shape.name,
                "rows": rows,
                "lora": lora is not None,
                "ms": took * 1e3,
                "TFLOP_s": flops / took / 1e12,
            }


def _step_row(
    shape: Shape,
    rows: int,
    count: int,
    ranks: str,
    num_bytes: float,
    took: float,
    base: float,
    copy: float,
) -> dict[str, Any]:
    return {
        "model": shape.name,
        "rows": rows,
        "adapters": count,
        "ranks": ranks,
        "ms": took * 1e3,
        "bytes_ms": num_bytes / copy * 1e3,
        "share_of_bandwidth": num_bytes / copy / took,
        "of_base": base / took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="block sizes too, before the models")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.tiny:
        parser.error("torch sees no CUDA device here; --tiny runs the parts on the CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(device, time.monotonic() + 60 * options.minutes, options.tiny)
    torch.set_grad_enabled(False)
    ops = CudaOps(device)
    bench.results["machine"] = describe(device)
    print(json.dumps(bench.results["machine"]))
    bench.part("ceilings", partial(ceilings, bench))
    bench.part("transfers", partial(transfers, bench))
    shapes = (TINY,) if options.tiny else (LLAMA_8B, QWEN_600M)
    for shape in shapes:
        model = ShapedModel(ops, shape, torch.bfloat16, 8193)
        for rows in (2,) if options.tiny else (8, 32, 256) if shape is shapes[0] else ():
            bench.part(f"ops, {rows} rows", partial(op_rows, bench, model, rows))
            bench.part(f"streams, {rows} rows", partial(beside_rows, bench, model, rows))
        if options.sweep and shape is shapes[0]:
            bench.part("sweep", partial(sweep, bench, model))
        bench.part(f"decode {shape.name}", partial(decode, bench, model))
        bench.part(f"prefill {shape.name}", partial(prefill, bench, model))
        bench.part(f"engine {shape.name}", partial(engine, bench, model))
        del model
        bench.part(f"adapters {shape.name}", partial(adapter_rows, bench, ops, shape))
        bench.part(f"swap {shape.name}", partial(swap_rows, bench, ops, shape))
        bench.part(f"transformers {shape.name}", partial(baseline, bench, shape))
    options.out.write_text(json.dumps(bench.results, indent=1) + "\n")


if __name__ == "__main__":
    main()
