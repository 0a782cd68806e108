"""`python -m tools.kernel_variants`: counts the specializations of each kernel that a worker's
steps compile.

Steps of a Llama-3-8B-shaped model with random numbers of tokens, sequences, adapters and pages are
launched with a stub of Triton's driver. Every kernel that Triton would compile is counted and not
compiled. The output is a JSON object with the number of specializations by kernel name.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any

import torch
from triton import knobs

from ops.cuda import CudaOps
from tools.hopper import add_lora, attend, sample
from tools.triton_driver import run_nothing

NUM_STEPS = 40


def main() -> None:
    forms: dict[str, set[str]] = defaultdict(set)

    def count(*, key: str, fn: Any, **_: Any) -> bool:
        forms[fn.name.rpartition(".")[2]].add(str(key))
        return True  # tells Triton not to compile the kernel

    run_nothing()
    knobs.runtime.jit_cache_hook = count  # pyright: ignore[reportAttributeAccessIssue]
    ops, rng = CudaOps(torch.device("cpu")), random.Random(0)
    bfloat16 = torch.bfloat16
    for _ in range(NUM_STEPS):
        context = 16 * rng.randint(1, 512)
        attend(ops, bfloat16, rng.randint(1, 256), 1, context)
        attend(ops, bfloat16, rng.randint(1, 4), rng.randint(2, 600), context)
        for max_rank in (16, 32, 64):
            rows = rng.randint(1, 256)
            layer = rng.randrange(32)
            add_lora(ops, bfloat16, rows, rng.randint(1, min(rows, 64)), max_rank, layer)
            add_lora(ops, bfloat16, rng.randint(257, 2048), rng.randint(1, 32), max_rank, layer)
        sample(ops, rng.randint(1, 256), rng.randint(0, 20))
    print(json.dumps({name: len(keys) for name, keys in sorted(forms.items())}))


if __name__ == "__main__":
    main()
