"""`python -m benchmarks.transformers_speed [FILE.gguf]`: compares the speed of the native
implementation of a model with the code of transformers, in the engine's steps, without HTTP.

Steps of the two alternate. For the second, this file removes the native families from the importer,
so that it falls back to transformers. The product has no setting for this.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from adapters.store.folder import LocalStore
from benchmarks.machine import describe
from ops.registry import select
from tests.workers.paged import PagedModel, Stream
from tests.workers.real_model import demo_gguf
from workers.importer import huggingface, import_model
from workers.models.loading import LoadedModel, load_model
from workers.models.plan import ModelPlan

ROWS = (1, 8, 32)
CONTEXT = 64


class Steps:
    """Decode steps of `rows` sequences, with one token of each."""

    def __init__(self, model: LoadedModel, ops_name: str, rows: int) -> None:
        self._model = PagedModel(model, select(ops_name), rows * 16)
        self._streams = [Stream() for _ in range(rows)]
        self._model.step([(stream, list(range(100, 100 + CONTEXT))) for stream in self._streams])

    def seconds(self) -> float:
        begin = time.perf_counter()
        self._model.step([(stream, [200]) for stream in self._streams])
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, nargs="?", help="GGUF file; default: the demo model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        native = import_model(arguments.source or demo_gguf(), store)
        huggingface.FAMILIES = {}
        forced = import_model(store.model_folder(native), store)
        ops = select("cpu")
        plans = [
            ModelPlan.read(store.model_folder(digest), digest, torch.bfloat16, 1024)
            for digest in (native, forced)
        ]
        models = [load_model(plan, ops) for plan in plans]
        for rows in ROWS:
            running = [Steps(model, "cpu", rows) for model in models]
            taken: list[list[float]] = [[], []]
            for _ in range(arguments.steps):
                for times, each in zip(taken, running, strict=True):
                    times.append(each.seconds())
            own, theirs = (sorted(times)[len(times) // 2] * 1e3 for times in taken)
            print(
                f"{rows:3} rows: native {own:6.1f} ms, transformers {theirs:6.1f} ms a step, "
                f"{own / theirs:.2f} of the native speed"
            )


if __name__ == "__main__":
    main()
