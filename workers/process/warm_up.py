"""Warm-up of an engine before its first request."""

from __future__ import annotations

from memory.page_key import PAGE_TOKENS
from workers.execution.engine import Engine
from workers.process.errors import CannotServe
from workers.wire.protocol import ErrorCode, Failed, Generate, SamplingParams

WARM_TOKENS = 8


def warm_up(engine: Engine) -> None:
    """Runs a short sequence through the whole engine, and then the maximum number of sequences in
    one step. After that, kernels are built, and caches and threads are warm. The prompts are
    shorter than a page, so that none of their pages stays cached. Raises CannotServe if a step
    fails."""
    longest = min(engine.info.max_model_len, PAGE_TOKENS)
    _run_alone(engine, [[0, 1, 2]], max_tokens=min(WARM_TOKENS, longest - 3))
    scheduler = engine.scheduler
    length = longest - 1
    fitting = min(scheduler.max_num_seqs, scheduler.kv.num_free)
    num_prompts = min(fitting, scheduler.max_batched_tokens // length)
    _run_alone(engine, [[0] * length] * num_prompts, max_tokens=1)


def _run_alone(engine: Engine, prompts: list[list[int]], max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        request = Generate(number, "warm-up", engine.info.digest, prompt, params, cache_domain="")
        failed = engine.submit(-1, request)
        assert failed is None, failed
    while engine.has_work:
        for _, event in engine.step():
            # A model with NaN logits is served, but each of its requests fails with LOGITS_NAN.
            if isinstance(event, Failed) and event.code is not ErrorCode.LOGITS_NAN:
                raise CannotServe(f"the step that warms the worker up failed: {event.message}")
