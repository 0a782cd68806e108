"""`python -m benchmarks.peers FOLDER [PEER=URL ...]`: compares loraplex with other servers.

PEER is `vllm`, or a format of llama.cpp's server: `BF16`, `Q8_0` or `Q4_0`. Without a PEER, the
demo model's files and the adapters of `benchmarks.serving` are written to FOLDER, and the commands
that convert the files for the other servers and start the servers are printed. All servers get the
same token ids from the same client, one server after the other in each round, so that changes of
the machine's speed affect all of them. A sample is dropped, and taken again, if the machine's
multiply rate changed by more than a third in between. Every round has new prompts, so that prefix
caches have no effect.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.load import Job, figures_of, run_load
from benchmarks.machine import SpeedProbe, describe
from benchmarks.serving import Bench, Case, make_jobs, select
from benchmarks.steady import COLUMNS, EXPLANATION, Samples
from tests.e2e.demo import NAME, gguf
from tests.stack import running

CASES = [
    Case("decode", "base", 64, 64, 4, 1),
    Case("decode", "base", 64, 64, 16, 8),
    Case("decode", "base", 64, 64, 32, 32),
    Case("decode", "E", 64, 32, 8, 8),
    Case("decode", "E", 64, 32, 32, 32),
    Case("prefill", "base", 1024, 8, 8, 8),
    Case("prefill", "E", 1024, 8, 8, 8),
]
FORMATS = ("BF16", "Q8_0", "Q4_0")
SLOTS = 32
SLOT_TOKENS = 1280
MODEL = "model-{}.gguf"

console = Console(width=150)


@dataclass(frozen=True, slots=True)
class Server:
    """Server with one format of the base model."""

    name: str
    url: str
    key: str
    format: str
    is_llama_cpp: bool = False

    def jobs(self, jobs: list[Job], adapters: list[str]) -> list[Job]:
        if self.is_llama_cpp:
            served = adapters if self.format == "BF16" else []
            return [self._with_scales(job, served) for job in jobs]
        base = NAME if self.format == "BF16" else self.format
        return [job if job.model in adapters else replace(job, model=base) for job in jobs]

    def _with_scales(self, job: Job, adapters: list[str]) -> Job:
        """Returns the job with a scale for each adapter: 1 for the job's adapter and 0 for others.
        llama.cpp applies every adapter of its command line that has no scale of 0."""
        scales = [
            {"id": number, "scale": float(name == job.model)}
            for number, name in enumerate(adapters)
        ]
        return replace(job, extra={"cache_prompt": False, "lora": scales})


def explain(bench: Bench, folder: Path) -> None:
    """Prints the commands that make the peers' files and start their servers."""
    adapters = bench.folders["E"]
    for format in FORMATS:
        target = folder / MODEL.format(format)
        print(f"llama-quantize --allow-requantize {gguf()} {target} {format}")
    for name, source in adapters.items():
        out = folder / f"{name}.gguf"
        print(
            f"convert_lora_to_gguf.py {source} --base {bench.model} --outtype bf16 --outfile {out}"
        )
    listed = ",".join(str(folder / f"{name}.gguf") for name in adapters)
    for port, format in enumerate(FORMATS, 8101):
        lora = f" --lora-init-without-apply --lora {listed}" if format == "BF16" else ""
        print(
            f"llama-server -m {folder / MODEL.format(format)} --host 127.0.0.1 --port {port} -t 2 "
            f"-tb 2 --parallel {SLOTS} -c {SLOTS * SLOT_TOKENS} --cache-ram 0{lora}"
        )
    modules = " ".join(f"{name}={source}" for name, source in adapters.items())
    print(
        "VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND=0-1 "
        f"vllm serve {bench.model} --host 127.0.0.1 --port 8100 --served-model-name {NAME} "
        "--dtype bfloat16 --max-model-len 2048 --enable-lora --max-loras 8 --max-lora-rank 64 "
        f"--lora-modules {modules}"
    )


def measure(
    bench: Bench, case: Case, server: Server, adapters: list[str], seed: int, attempt: int
) -> float:
    """Returns the server's tokens per second in one case: prompt and output tokens in a prefill
    case, and output tokens in other cases. Each attempt has its own prompts."""
    models = adapters if case.ranks == "E" else [NAME]
    jobs = make_jobs(case, models, bench.shape.vocab_size, (seed, attempt))
    outcomes = run_load(server.url, server.key, server.jobs(jobs, adapters), case.concurrency)
    figures = figures_of(asyncio.run(outcomes))
    return figures.total_per_s if case.name == "prefill" else figures.output_per_s


def compare(bench: Bench, servers: list[Server], rounds: int, only: str) -> None:
    """Prints the tokens per second of each case and server, with the machine's speed around the
    samples."""
    adapters = list(bench.folders["E"])
    probe = SpeedProbe()
    table = Table(
        title=f"tokens/s through HTTP, medians of {rounds} rounds in turns", caption=EXPLANATION
    )
    for column in ("case", "adapters", "streams", "server", "tokens/s", "quartiles", *COLUMNS):
        table.add_column(column, justify="right")
    for case in filter(select(only), CASES):
        able = [each for each in servers if case.ranks == "base" or each.format == "BF16"]
        taken = {server.name: Samples() for server in able}
        for number in range(rounds):
            for server in able:
                measured = partial(measure, bench, case, server, adapters, number)
                taken[server.name].take(measured, probe)
        table.add_section()
        for name, samples in taken.items():
            cells = ["", ""]
            if samples.values:
                low, middle, high = np.percentile(samples.values, [25, 50, 75])
                cells = [f"{middle:.0f}", f"{low:.0f} to {high:.0f}"]
            row = (case.name, case.ranks, str(case.concurrency), name)
            table.add_row(*row, *cells, *samples.cells())
        rates = {name: samples.values for name, samples in taken.items()}
        console.print(f"{case.name} {case.ranks} {case.concurrency}: {rates}", soft_wrap=True)
    console.print(table)


def named_servers(peers: Iterable[str]) -> list[Server]:
    servers: list[Server] = []
    for peer in peers:
        kind, _, url = peer.partition("=")
        if kind == "vllm":
            servers.append(Server("vllm", url, "none", "BF16"))
        elif kind in FORMATS:
            servers.append(Server(f"llama.cpp {kind}", url, "none", kind, is_llama_cpp=True))
        else:
            raise SystemExit(f"{peer!r} is not vllm=URL or one of {', '.join(FORMATS)} with =URL")
    return servers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("peers", nargs="*", metavar="PEER=URL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="part of 'CASE ADAPTERS cSTREAMS'")
    arguments = parser.parse_args()
    peers = named_servers(arguments.peers)
    formats = [each.format for each in peers if each.format != "BF16"]
    kept = {each: arguments.folder / MODEL.format(each) for each in formats}
    bench = Bench(arguments.folder, memory="2GiB", threads=2, kept=kept)
    if not peers:
        explain(bench, arguments.folder)
        return
    console.print(describe())
    with running(bench.stack):
        bench.push()
        ours = [
            Server(f"loraplex {format}", bench.stack.url, bench.key, format)
            for format in ("BF16", *formats)
        ]
        compare(bench, [*ours, *peers], arguments.rounds, arguments.only)


if __name__ == "__main__":
    main()
