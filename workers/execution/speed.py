"""Measurement of a model's speed before the first request."""

from __future__ import annotations

from collections.abc import Callable

from workers.execution.engine import Engine
from workers.execution.warm_up import trial_step

ENOUGH_S = 0.25
"""Minimum seconds of a step that is timed only once. Prompts longer than the first prompt that
takes this time are not timed."""
FIRST_CHUNK, GROWTH = 64, 4
"""Number of tokens of the shortest timed prompt, and factor from one prompt length to the next."""
FAR = 1024
"""Position of the first token in steps with a long context."""


def measure_speed(engine: Engine, clock: Callable[[], float]) -> None:
    """Records times of typical steps in the scheduler's policy: decoding sequences, prompts of
    several lengths, short and long contexts. Called while no sequence runs. The steps use only the
    first page and the first slot of the token buffer. Raises the error of a step that fails."""
    runner, scheduler = engine.runner, engine.scheduler
    assert runner is not None
    max_len, max_tokens = engine.info.max_model_len, scheduler.max_batched_tokens

    def time(num_sequences: int, num_tokens: int, start: int) -> float:
        """Runs a step three times. Records and returns the seconds of the shorter of the last two
        runs, because other work on the machine can only lengthen a run. If the first run takes
        `ENOUGH_S` or more, it is not repeated, and its time is used."""
        start = min(start, max_len - 1 - num_tokens)
        step = trial_step([start] * num_sequences, [num_tokens] * num_sequences, num_sequences)
        times_s: list[float] = []
        for _ in range(3):
            begin_s = clock()
            runner.launch(step).result()
            times_s.append(clock() - begin_s)
            if times_s[0] >= ENOUGH_S:
                break
        seconds = min(times_s[1:] or times_s)
        num_computed = num_sequences * num_tokens
        scheduler.policy.record_step(num_computed, num_computed * start, seconds, seconds)
        return seconds

    most = min(scheduler.max_num_seqs, max_tokens)
    for num_sequences in (1, -(-most // 2), most):
        for start in (0, FAR):
            time(num_sequences, 1, start)
    longest = min(max_tokens, max_len - 1)
    chunk = min(FIRST_CHUNK, longest)
    while time(1, chunk, 0) < ENOUGH_S and chunk < longest:
        chunk = min(GROWTH * chunk, longest)
    time(1, chunk, FAR)
