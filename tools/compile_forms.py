"""`python -m tools.compile_forms FORMS FOLDER`: compiles forms of kernels, as `tools.kernel_forms`
printed them, for sm_90 into a cache folder of Triton.

Triton finds a kernel in such a folder only if the very same build of Triton compiled it, so this
runs under the Python and the Triton of the machine that the folder is for. It needs
numpy and no torch.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import Pool
from pathlib import Path
from types import ModuleType
from typing import Any

from triton import knobs
from triton.runtime.jit import JITFunction

from tools.triton_driver import run_nothing

if find_spec("torch") is None:
    # The modules with kernels name it for the functions that launch them, which are not called.
    sys.modules["torch"] = ModuleType("torch")
    vars(sys.modules["torch"])["Tensor"] = object


def begin(folder: str, forms: list[dict[str, Any]]) -> None:
    knobs.cache.dir = folder
    # Without the representations between source and machine code, which nothing reads.
    knobs.compilation.store_binary_only = True
    run_nothing()
    for form in forms:
        # A kernel's key depends on which kernels that share functions with it had theirs before:
        # all get theirs in the order in which they are launched.
        assert function(form).cache_key


def function(form: dict[str, Any]) -> JITFunction[Any]:
    return getattr(import_module(form["module"]), form["name"])


def compile_form(form: dict[str, Any]) -> None:
    data = form["data"]
    if version("triton") < "3.7":
        # Later versions record an empty attribute for each constant, which was no part of the key.
        constants = data["constant_keys"]
        attrs = zip(data["attrs_keys"], data["attrs_vals"], strict=True)
        kept = [(key, value) for key, value in attrs if key not in constants]
        data["attrs_keys"], data["attrs_vals"] = zip(*kept, strict=True)
    function(form).preload(json.dumps(data))


def main() -> None:
    forms, folder = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    with Pool(os.cpu_count(), begin, (folder, forms)) as pool:
        pool.map(compile_form, forms, chunksize=1)
    print(f"{len(forms)} kernels are compiled")


if __name__ == "__main__":
    main()
