"""`python -m benchmarks.transformers_speed [FILE.gguf]`: compares the speed of the native
implementation of a model with the code of transformers, in the engine's steps, without HTTP.

Steps of all forms are taken in turns. The file changes the importer, so that it ignores native
families, the recogniser of modules, so that it finds no whole layers or no modules, and the number
of kernel threads, so that it stays the same alongside busy processes. The product has no settings
for this.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from adapters.store.folder import LocalStore
from benchmarks.machine import describe
from ops.registry import select
from ops.thread_count import ThreadCount
from tests.workers.paged import PagedModel, Stream
from tests.workers.real_model import demo_gguf
from workers.importer import huggingface, import_model
from workers.models import transformers_decoder
from workers.models.loading import LoadedModel, load_model
from workers.models.plan import ModelPlan
from workers.models.recognition import Recognised, recognise

ROWS = (1, 8, 32)
CONTEXT = 64


def recognise_modules(*arguments: Any) -> Recognised:
    """Recognises no whole layers, as in a mixture of experts."""
    return replace(recognise(*arguments), layers=None)


FORMS: dict[str, Callable[..., Recognised]] = {
    "whole layers": recognise,
    "single modules": recognise_modules,
    "none recognised": lambda *_: Recognised(),
}
"""Recognisers of the compared forms of a model in transformers' code."""


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
    # In turns, the steps of one form would run with the number that another form's steps caused.
    ThreadCount.record_step = lambda self, begin, end: self.limit
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        native = import_model(arguments.source or demo_gguf(), store)
        huggingface.FAMILIES = {}
        forced = import_model(store.model_folder(native), store)
        models = {"native": load(store, native)}
        for form, cut in FORMS.items():
            with patch.object(transformers_decoder, "recognise", cut):
                models[form] = load(store, forced)
        for rows in ROWS:
            running = {form: Steps(model, "cpu", rows) for form, model in models.items()}
            taken: dict[str, list[float]] = {form: [] for form in models}
            forms = list(models)
            for _ in range(arguments.steps):
                for form in forms:
                    taken[form].append(running[form].seconds() * 1e3)
                forms.reverse()
            for form, times in taken.items():
                shares = [of(taken["native"]) / of(times) for of in (median, min)]
                print(
                    f"{rows:3} rows, {form:16} {median(times):6.1f} ms a step, least "
                    f"{min(times):6.1f}; {shares[0]:.2f} of the native speed, least {shares[1]:.2f}"
                )


def load(store: LocalStore, digest: str) -> LoadedModel:
    plan = ModelPlan.read(store.model_folder(digest), digest, torch.bfloat16, 1024)
    return load_model(plan, select("cpu"))


if __name__ == "__main__":
    main()
