"""Warm-up of a runner, so that no kernel is compiled during a request.

A kernel is compiled in several forms. The form that a step uses depends on the kind of its
sequences (decode or prefill, a context of one part or several, adapters of few or many tokens), not
on exact numbers. The warm-up runs steps that use every form of every kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from time import perf_counter_ns

import numpy as np
import torch

from memory.page_key import pages_of
from workers.execution.batch import rank_bounds
from workers.execution.model_runner import ModelRunner
from workers.execution.step_input import SampleInput, ScoreInput, StepInput
from workers.scheduling.constraint import NO_TOKENS
from workers.wire.protocol import SamplingParams

log = logging.getLogger(__name__)

FAR = 300
"""Length in tokens of a context that attention splits into parts, because it is longer than
`ops.triton_table.PART_TOKENS`."""
SHORT_CHUNK, LONG_CHUNK = 32, 80
"""Lengths in tokens of two prompts. The short prompt fits one tile of a LoRA kernel, and the long
prompt needs several tiles."""

GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
EVERYTHING = SamplingParams(
    max_tokens=1,
    seed=0,
    temperature=0.8,
    top_k=5,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
    logprobs=3,
)


@torch.inference_mode()
def warm_up_runner(runner: ModelRunner, max_rank: int, max_tokens: int) -> int:
    """Compiles every form of the kernels that steps of up to `max_tokens` tokens use, with adapters
    up to `max_rank`, and captures the steps' graphs. Returns the number of graphs. Called while no
    sequence runs. Raises the error of a step that fails."""
    begin = perf_counter_ns()
    model, ops, graphs = runner.model, runner.ops, runner.graphs
    model.arrival.synchronize()
    if ops.compiles:
        for step in every_form(model.plan.max_model_len, max_tokens, max_rank):
            runner.launch(step, may_use_graph=False).result()
    num_graphs = 0 if graphs is None else graphs.capture_all()
    log.info(
        "%d kernels compiled or read, %d graphs captured in %.1f s",
        *(ops.num_compiled, num_graphs, (perf_counter_ns() - begin) / 1e9),
    )
    return num_graphs


def every_form(max_len: int, max_tokens: int, max_rank: int) -> Iterator[StepInput]:
    """Yields steps of up to `max_tokens` tokens at positions below `max_len - 1`."""
    for rank in (0, *rank_bounds(max_rank)):
        far = min(FAR, max_len - 2)
        yield trial_step([0], [1], 0, rank=rank)
        for chunk, start in ((SHORT_CHUNK, 0), (LONG_CHUNK, FAR)):
            count = max(min(chunk, max_tokens - 1, max_len - 1), 1)
            starts = [far if start else 0, min(start, max_len - 1 - count)]
            yield trial_step(starts, [1, count], 1, rank=rank)
            if not rank:
                yield trial_step(starts, [1, count], 1, EVERYTHING)


def trial_step(
    starts: list[int],
    counts: list[int],
    num_samples: int,
    params: SamplingParams = GREEDY,
    rank: int = 0,
) -> StepInput:
    """Returns a step of sequences with these first positions and numbers of tokens, of which the
    first `num_samples` draw a token. If `params` is `EVERYTHING` and the last sequence has several
    tokens, its tokens are also scored. The step uses only the first page, the first slot of the
    token buffer and the first adapter slot."""
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    scores: list[ScoreInput] = []
    if params is EVERYTHING and counts[-1] > 1:
        scores = [ScoreInput(len(counts) - 1, [0] * (counts[-1] - 1), 3)]
    return StepInput(
        sequence_slots=np.zeros(len(counts), np.int64),
        adapter_slots=np.full(len(counts), 0 if rank else -1, np.int32),
        starts=np.array(starts, np.int32),
        counts=np.array(counts, np.int32),
        block_tables=np.zeros((len(counts), pages_of(max(ends))), np.int64),
        max_rank=rank,
        samples=[SampleInput(i, ends[i], 0, params, NO_TOKENS) for i in range(num_samples)],
        scores=scores,
    )
