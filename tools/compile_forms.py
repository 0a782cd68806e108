"""`python -m tools.compile_forms FORMS FOLDER`: compiles kernels for sm_90 into FOLDER, a cache
folder of Triton. FORMS is a file with the output of `tools.kernel_forms`, which lists the kernels
and their specializations.

Triton finds a kernel in a cache folder only if the same build of Triton compiled it. This tool
therefore needs the Python and Triton versions of the machine on which the folder is used. It also
needs numpy, but not torch.
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
    # The modules with kernels import torch for the functions that launch the kernels. These
    # functions are not called here, so an empty module is enough.
    sys.modules["torch"] = ModuleType("torch")
    vars(sys.modules["torch"])["Tensor"] = object


def begin(folder: str, forms: list[dict[str, Any]]) -> None:
    knobs.cache.dir = folder
    # Stores only machine code. The intermediate representations are not needed.
    knobs.compilation.store_binary_only = True
    run_nothing()
    for form in forms:
        # A kernel's cache key depends on which kernels that share functions with it computed their
        # keys before. All keys are therefore computed here, in the order of the launches.
        assert function(form).cache_key


def function(form: dict[str, Any]) -> JITFunction[Any]:
    return getattr(import_module(form["module"]), form["name"])


def compile_form(form: dict[str, Any]) -> None:
    data = form["data"]
    if version("triton") < "3.7":
        # Versions from 3.7 record an empty attribute for each constant. Earlier versions do not
        # have these attributes in a kernel's cache key.
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
