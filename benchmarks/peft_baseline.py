"""Runs a workload with transformers and peft, in static batches whose rows may use different
adapters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.load import Job


def run_peft(model: Path, adapters: dict[str, Path], jobs: Sequence[Job], batch_size: int) -> float:
    """Runs all jobs with greedy sampling, in batches of `batch_size`. Returns the output tokens per
    second."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    for name, folder in adapters.items():
        if isinstance(base, PeftModel):
            base.load_adapter(str(folder), name)
        else:
            base = PeftModel.from_pretrained(base, str(folder), name).eval()
    num_tokens = 0
    begin = time.perf_counter()
    for first in range(0, len(jobs), batch_size):
        batch = jobs[first : first + batch_size]
        _generate(base, batch, has_adapters=bool(adapters))
        num_tokens += sum(job.num_output for job in batch)
    return num_tokens / (time.perf_counter() - begin)


@torch.inference_mode()
def _generate(model: torch.nn.Module, batch: Sequence[Job], *, has_adapters: bool) -> None:
    ids = torch.tensor([job.prompt for job in batch])
    extra = {"adapter_names": [job.model for job in batch]} if has_adapters else {}
    model.generate(  # pyright: ignore[reportCallIssue]
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=batch[0].num_output,
        max_new_tokens=batch[0].num_output,
        pad_token_id=0,
        **extra,
    )
