"""`python -m benchmarks.llama_cpp FOLDER URL`: llama.cpp's server beside loraplex, in turns.

Without URL it writes the demo model's file and the adapters of `benchmarks.serving` into FOLDER, to
be made GGUF of bfloat16 with llama.cpp's `llama-quantize` and `convert_lora_to_gguf.py`, and says
how to serve them. Both servers get the same token ids from the same client, in turns, so that a
machine whose speed changes changes it for both.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.load import Job, figures_of, run_load
from benchmarks.machine import describe, read_bandwidth
from benchmarks.serving import Bench, Case, make_jobs, milliseconds
from loraplex.load.figures import Figures
from tests.e2e.demo import NAME, gguf
from tests.stack import running

CASES = [
    Case("decode", "base", 64, 128, 4, 1),
    Case("decode", "base", 64, 128, 24, 8),
    Case("decode", "E", 64, 128, 24, 8),
]
SLOTS = 8
SLOT_TOKENS = 256

console = Console()


def explain(bench: Bench) -> None:
    adapters = " ".join(f"--lora {name}.gguf" for name in bench.folders["E"])
    console.print(f"llama-quantize --allow-requantize {gguf()} model.gguf BF16")
    for name, folder in bench.folders["E"].items():
        options = f"--base {bench.model} --outtype bf16 --outfile {name}.gguf"
        console.print(f"convert_lora_to_gguf.py {folder} {options}")
    console.print(
        f"llama-server -m model.gguf -t 2 -np {SLOTS} -c {SLOTS * SLOT_TOKENS} --cache-ram 0 "
        f"--lora-init-without-apply {adapters}"
    )


def measure(url: str, key: str, jobs: list[Job], concurrency: int) -> Figures:
    return figures_of(asyncio.run(run_load(url, key, jobs, concurrency)))


def for_llama_cpp(job: Job, adapters: list[str]) -> Job:
    """llama.cpp is told the scale of each adapter of its command line."""
    scales = [
        {"id": number, "scale": float(name == job.model)} for number, name in enumerate(adapters)
    ]
    return replace(job, extra={"cache_prompt": False, "lora": scales})


def compare(bench: Bench, url: str, rounds: int) -> None:
    table = Table(title=f"output tokens/s through HTTP, medians of {rounds} rounds in turns")
    for column in ("adapters", "at a time", "loraplex", "llama.cpp", "ratio", "TTFT ms", "ITL ms"):
        table.add_column(column, justify="right")
    adapters = list(bench.folders["E"])
    for case in CASES:
        jobs = make_jobs(case, list(bench.folders[case.ranks]) or [NAME], bench.shape.vocab_size)
        theirs = [for_llama_cpp(job, adapters) for job in jobs]
        pairs: list[tuple[Figures, Figures]] = []
        for _ in range(rounds):
            ours = measure(bench.stack.url, bench.key, jobs, case.concurrency)
            pairs.append((ours, measure(url, "none", theirs, case.concurrency)))
        first, second = (median(pair[side].output_per_s for pair in pairs) for side in (0, 1))
        ratio = median(one.output_per_s / other.output_per_s for one, other in pairs)
        last = pairs[-1]
        table.add_row(
            *(case.ranks, str(case.concurrency), f"{first:.0f}", f"{second:.0f}", f"{ratio:.2f}"),
            " | ".join(milliseconds(figures.ttft_ms) for figures in last),
            " | ".join(milliseconds(figures.itl_ms) for figures in last),
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("url", nargs="?", help="of llama-server; without it files are written only")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    bench = Bench(arguments.folder, memory="1GiB", threads=2)
    if arguments.url is None:
        explain(bench)
        return
    console.print(f"{describe()}; reads {read_bandwidth() / 1e9:.1f} GB/s")
    with running(bench.stack):
        bench.push()
        compare(bench, arguments.url, arguments.rounds)


if __name__ == "__main__":
    main()
