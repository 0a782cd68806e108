"""`python -m tools.late_kernels FOLDER`: counts the kernels that a worker compiles before its first
request, and lists the kernels that its requests compile later.

The worker is a real one with the ops of the `cuda` backend and a stub of Triton's driver. Every
kernel that Triton would compile is recorded, and none is run, so results are uninitialized memory.
Only sampled tokens are defined; they are 0. The output is a JSON object with the number of early
kernels, the names of the late kernels, and the number of generated tokens.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from ops.base import Ops, SamplingBatch
from ops.cuda import CudaOps
from tests.workers.driver import Driver
from tests.workers.formed_worker import FormedWorker
from tests.workers.process.test_worker import Setup
from tools.triton_driver import SHARED_BYTES, run_nothing
from workers.wire.protocol import Generate, SamplingParams

ADAPTERS = {name: {"rank": rank} for name, rank in (("low", 4), ("middle", 40), ("high", 90))}
forms: dict[str, str] = {}


def count(*, key: str, fn: Any, **_: Any) -> bool:
    forms[str(key) + fn.name] = fn.name.rpartition(".")[2]
    return True  # tells Triton not to compile the kernel


class UnrunOps(CudaOps):
    """Ops that launch kernels without running them. `capture` runs the work once, as on a GPU."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.compiles = self.overlaps = True
        self.shared_bytes = SHARED_BYTES

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        work()
        return work

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return super().sample(logits, batch).zero_()


class UnrunWorker(FormedWorker):
    def _select_ops(self) -> Ops:
        return UnrunOps()


def requests(setup: Setup, rng: random.Random) -> list[Generate]:
    """Returns 40 requests with random prompt lengths, sampling parameters and adapters."""
    made: list[Generate] = []
    for number in range(40):
        prompt = [rng.randrange(256) for _ in range(rng.choice([1, 3, 16, 17, 100, 300, 400]))]
        params = SamplingParams(
            rng.randint(1, 30),
            seed=number,
            temperature=rng.choice([0.0, 1.0]),
            top_k=rng.choice([0, 3]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.1]),
            presence_penalty=rng.choice([0.0, 1.0]),
            logit_bias=rng.choice([None, {9: 2.0}]),
            logprobs=rng.choice([None, 0, 1, 7, 20]),
            prompt_logprobs=rng.choice([None, None, 1]),
            ignore_eos=True,
        )
        adapter = rng.choice([None, *setup.refs.values()])
        made.append(
            Generate(number, "", setup.digest, prompt, params, cache_domain="t", adapter=adapter)
        )
    return made


def main() -> None:
    run_nothing()
    knobs.runtime.jit_cache_hook = count  # pyright: ignore[reportAttributeAccessIssue]
    setup = Setup(Path(sys.argv[1]), "llama", ADAPTERS)
    config = setup.config(
        dtype="bfloat16",
        memory=16 << 20,
        max_batched_tokens=256,
        max_num_seqs=20,
        max_lora_rank=128,
        uses_graphs=True,
        runs_ahead=True,
    )
    with Driver(config, UnrunWorker) as worker:
        early = set(forms)
        for request in requests(setup, random.Random(0)):
            worker.submit(request)
        worker.wait()
    late = sorted(forms[form] for form in forms.keys() - early)
    num_tokens = sum(map(len, worker.answers.values()))
    print(json.dumps({"early": len(early), "late": late, "tokens": num_tokens}))


if __name__ == "__main__":
    main()
