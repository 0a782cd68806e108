"""`python -m benchmarks.weight_formats [FILE.gguf]`: compares weight formats of a base model, in
the engine, without HTTP.

For each format, prints the size, the step time at 1, 8 and 32 rows, the perplexity of a fixed text,
and the share of positions at which the most likely token is the same as in bfloat16. The share is
measured for the base model, and on greedy answers of the example adapters. Steps of the formats
alternate. With one thread, its CPU time is measured, otherwise wall-clock time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from adapters.store.folder import LocalStore
from benchmarks.machine import describe
from examples.questions import QUESTIONS
from memory.page_key import pages_of
from ops.registry import select
from tests.workers.paged import PagedModel, Stream
from tests.workers.real_model import demo_gguf
from workers.importer import ImportFormat, import_model
from workers.models.loading import load_model
from workers.models.plan import ModelPlan

FORMATS: tuple[ImportFormat, ...] = ("bfloat16", "keep", "int8", "int4")
TOPICS = ("class", "exceptions", "import", "naming", "typesmapping")
"""Sections of the Python reference, which are the same in every copy of a Python version."""
WINDOW, NUM_WINDOWS = 512, 8
NUM_ANSWER = 32
ROWS = (1, 8, 32)
ADAPTERS = Path(__file__).parents[1] / "examples/adapters"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class Model:
    """Base model in one weight format."""

    def __init__(self, source: Path, weight_format: ImportFormat, folder: Path, threads: int):
        self.ops = select("cpu", threads=threads)
        digest = import_model(source, LocalStore(folder), weight_format=weight_format)
        self.folder = folder / "models" / digest
        plan = ModelPlan.read(self.folder, digest, torch.bfloat16, 1024)
        self.decoder = load_model(plan, self.ops)

    def paged(self, num_pages: int) -> PagedModel:
        return PagedModel(self.decoder, self.ops, num_pages)

    def logits(self, tokens: list[int], adapter: Path | None = None) -> torch.Tensor:
        """Returns the logits [tokens, V] of one sequence."""
        model = self.paged(pages_of(len(tokens)))
        if adapter is not None:
            model.load_adapter(0, adapter)
        (logits,) = model.step([(Stream(-1 if adapter is None else 0), tokens)])
        return logits

    def answer(self, prompt: list[int], adapter: Path) -> list[int]:
        model = self.paged(pages_of(len(prompt) + NUM_ANSWER))
        model.load_adapter(0, adapter)
        return model.generate(Stream(0), prompt, NUM_ANSWER)


class Steps:
    """Decode steps of `rows` sequences, with one token of each. The first step follows a prompt of
    64 tokens."""

    def __init__(self, model: Model, rows: int) -> None:
        self._model = model.paged(rows * 16)
        self._streams = [Stream() for _ in range(rows)]
        self._model.step([(stream, list(range(100, 164))) for stream in self._streams])

    def seconds(self, clock: Callable[[], float]) -> float:
        begin = clock()
        self._model.step([(stream, [200]) for stream in self._streams])
        return clock() - begin


def step_times(models: dict[str, Model], steps: int, threads: int) -> dict[str, dict[int, float]]:
    """Returns the median seconds of a step, by format and rows."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    times: dict[str, dict[int, float]] = {name: {} for name in models}
    for rows in ROWS:
        running = {name: Steps(model, rows) for name, model in models.items()}
        taken: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(steps):
            for name, each in running.items():
                taken[name].append(each.seconds(clock))
        for name, values in taken.items():
            times[name][rows] = sorted(values)[len(values) // 2]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, nargs="?", help="GGUF file; default: the demo model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=100, help="timed steps of each format")
    parser.add_argument("--speed-only", action="store_true", help="no perplexity, no answers")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    source = arguments.source or demo_gguf()
    with tempfile.TemporaryDirectory() as folder:
        models = {name: Model(source, name, Path(folder), arguments.threads) for name in FORMATS}
        times = step_times(models, arguments.steps, arguments.threads)
        rows = {name: speed_cells(name, models, times) for name in models}
        if not arguments.speed_only:
            for name, cells in quality_cells(models, is_demo=arguments.source is None).items():
                rows[name] += cells
    show(rows, arguments)


def speed_cells(
    name: str, models: dict[str, Model], times: dict[str, dict[int, float]]
) -> list[str]:
    cells = [f"{models[name].decoder.num_bytes / 1e6:.0f}"]
    for rows in ROWS:
        ratio = times["bfloat16"][rows] / times[name][rows]
        cells.append(f"{times[name][rows] * 1e3:.1f} ({ratio:.2f})")
    return cells


def quality_cells(models: dict[str, Model], *, is_demo: bool) -> dict[str, list[str]]:
    """Returns the cells of each format with its perplexity, its agreement with bfloat16, and for
    the demo model its agreement with adapters."""
    tokenizer = Tokenizer.from_file(str(models["bfloat16"].folder / "tokenizer.json"))
    ids = tokenizer.encode("\n\n".join(topics[name] for name in TOPICS)).ids
    windows = [ids[start : start + WINDOW] for start in range(0, WINDOW * NUM_WINDOWS, WINDOW)]
    losses: dict[str, float] = dict.fromkeys(models, 0.0)
    agreed: dict[str, int] = dict.fromkeys(models, 0)
    equal: dict[str, bool] = dict.fromkeys(models, True)
    for window in windows:
        oracle = models["bfloat16"].logits(window)
        for name, model in models.items():
            logits = model.logits(window)
            equal[name] &= torch.equal(logits, oracle)
            agreed[name] += int((logits.argmax(1) == oracle.argmax(1)).sum())
            chosen = logits[:-1].log_softmax(1).gather(1, torch.tensor(window[1:])[:, None])
            losses[name] -= float(chosen.double().sum())
    total = WINDOW * NUM_WINDOWS
    cells = {
        name: [
            f"{float(torch.tensor(losses[name] / (total - NUM_WINDOWS)).exp()):.3f}",
            "every bit" if equal[name] else f"{agreed[name] / total:.1%}",
        ]
        for name in models
    }
    if is_demo:
        for name, agreement in adapter_agreement(models, tokenizer).items():
            cells[name].append(agreement)
    return cells


def adapter_agreement(models: dict[str, Model], tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the share of tokens of bfloat16's greedy answers that each format would choose."""
    agreed: dict[str, int] = dict.fromkeys(models, 0)
    total = 0
    for adapter in sorted(ADAPTERS.glob("*/*/")):
        for question, *_ in QUESTIONS[:3]:
            prompt = tokenizer.encode(CHAT.format(question)).ids
            answer = models["bfloat16"].answer(prompt, adapter)
            total += len(answer)
            for name, model in models.items():
                logits = model.logits([*prompt, *answer[:-1]], adapter)[len(prompt) - 1 :]
                agreed[name] += int((logits.argmax(1) == torch.tensor(answer)).sum())
    return {name: f"{count / total:.1%}" for name, count in agreed.items()}


def show(rows: dict[str, list[str]], arguments: argparse.Namespace) -> None:
    console = Console(width=140)
    clock = "CPU ms" if arguments.threads == 1 else "ms"
    console.print(f"{describe()}; {arguments.steps} steps, {sys.version.split()[0]}")
    table = Table(title="step times: in brackets, bfloat16's time / this format's")
    table.add_column("format")
    names = ["MB", *(f"{clock}, {number} rows" for number in ROWS), "perplexity"]
    names += ["most likely token as in bfloat16", "the same with adapters"]
    for name in names[: len(rows["bfloat16"])]:
        table.add_column(name, justify="right")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
