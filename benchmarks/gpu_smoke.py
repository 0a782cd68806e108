"""Stage `smoke`: measures the maximum rates of the GPU, and checks that the driver's calls for
memory and streams work.

Other stages report their figures as shares of these rates of a copy, a matrix product and a
transfer.
"""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu_numerics import FULL, SMALL, Cases
from benchmarks.gpu_timing import Bench
from ops.cuda import CudaOps
from workers.device.cuda_memory import CudaVirtualMemory

Rows = Iterator[dict[str, Any]]

EXTENT_BYTES = 64 << 20
NUM_PRODUCTS = 400
"""Number of 8192 x 8192 products in bfloat16, which take half a second. They keep the device busy
while memory is mapped."""


@triton.jit
def _nothing(x):
    tl.store(x, 0.0)


def describe(device: torch.device) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["triton"] = triton.__version__
    if device.type == "cpu":
        return {"device": "cpu, interpreted", **versions}
    properties = torch.cuda.get_device_properties(device)
    free, _ = torch.cuda.mem_get_info(device)
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "free": free,
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
        **versions,
    }


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown: {error}"


def ceilings(bench: Bench) -> Rows:
    size = 1 << (12 if bench.tiny else 31)
    source = torch.zeros(size // 2, dtype=torch.bfloat16, device=bench.device)
    target = torch.empty_like(source)
    # Copies with a kernel, because the driver's copy in a graph reached only 2/3 of the rate.
    copy = 2 * size / bench.seconds(lambda: torch.neg(source, out=target))
    a, b = _factors(bench)
    product = 2 * len(a) ** 3 / bench.seconds(lambda: a @ b)
    x = torch.zeros(1, device=bench.device)
    count = 2 if bench.tiny else 200

    def launches() -> None:
        for _ in range(count):
            _nothing[(1,)](x)

    launch = bench.seconds(launches) / count
    bench.results["copy_bytes_per_second"] = copy
    yield {"copy_TB_s": copy / 1e12, "bf16_TFLOP_s": product / 1e12, "launch_us": launch * 1e6}


def transfers(bench: Bench) -> Rows:
    """Yields rows for transfers from pinned memory: a page, an adapter of rank 16, and 1 GiB of
    weights. The rate of the last is the reference for swaps."""
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


def first_launch(ops: CudaOps, compiler: dict[str, int], tiny: bool) -> Rows:
    """Yields a row with the times of the first two launches of an attention step. If the kit's
    cache has the kernels, `compiled` is 0."""
    cases = Cases(ops, SMALL if tiny else FULL)
    case = next(cases.parts[f"attention, head size {cases.sizes.heads[0].dim}"]())

    def timed() -> float:
        begin = time.perf_counter()
        case.run()
        ops.record_event().synchronize()
        return 1e3 * (time.perf_counter() - begin)

    yield {"first_ms": timed(), "second_ms": timed(), **compiler}


def driver_rows(bench: Bench) -> Rows:
    """Yields rows for the driver's calls that swaps use, with one extent of 64 MiB each, on an idle
    device and while kernels run. Then checks that a kernel can use a reserved range whose second
    extent is not mapped, and that a graph can be captured while another stream copies."""
    device = bench.device
    virtual, size = CudaVirtualMemory.of(device), EXTENT_BYTES
    yield {"what": "granularity", "bytes": virtual.granularity}

    def timed(name: str, call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        begin = time.perf_counter()
        result = call()
        return result, {"what": name, "us": (time.perf_counter() - begin) * 1e6}

    pieces: list[int] = []
    for _ in range(3):
        piece, row = timed("create", lambda: virtual.create(size))
        pieces.append(piece)
        yield row
    addresses, row = timed("reserve", lambda: virtual.reserve(4 * size))
    yield row
    start = addresses.data_ptr()
    yield timed("map three", lambda: virtual.map(start, pieces, size))[1]
    yield timed("unmap", lambda: virtual.unmap(start + size, size))[1]
    _nothing[(1,)](addresses[:64].view(torch.float32))
    _nothing[(1,)](addresses.view(torch.float32)[2 * size // 4 :])
    torch.cuda.synchronize()
    yield {"what": "a kernel next to an extent that is not mapped", "passed": True}
    a, b = _factors(bench)
    end = torch.cuda.Event()
    for _ in range(NUM_PRODUCTS):
        torch.matmul(a, b)
    end.record()
    yield timed("map, kernels running", lambda: virtual.map(start + size, pieces[1:2], size))[1]
    yield timed("unmap, kernels running", lambda: virtual.unmap(start + size, size))[1]
    yield timed("create, kernels running", lambda: pieces.append(virtual.create(size)))[1]
    yield {"what": "maps do not wait for kernels", "passed": not end.query()}
    end.synchronize()
    yield from _streams(device)


def _streams(device: torch.device) -> Rows:
    ops = CudaOps(device)
    names = ("capture", "adapters", "tables", "weights")
    handles = {ops._streams[name].cuda_stream for name in names}  # pyright: ignore
    yield {"what": "streams that differ", "number": len(handles), "passed": len(handles) == 4}
    x, host = torch.zeros(1 << 20, device=device), torch.ones(1 << 20).pin_memory()
    other = torch.empty_like(x)

    def work() -> Tensor:
        with ops.side_stream("adapters"):
            other.copy_(host, non_blocking=True)
        return x.add_(1)

    run = ops.capture(work)
    run()
    torch.cuda.synchronize()
    yield {"what": "a capture while a copy runs", "passed": float(x[0]) == 2.0}


def _factors(bench: Bench) -> tuple[Tensor, Tensor]:
    side = 64 if bench.tiny else 8192
    a = torch.randn(side, side, dtype=torch.bfloat16, device=bench.device)
    return a, torch.randn_like(a)
