"""Sequences of one request, which compute its answers on workers, and the frames that are sent to
begin them."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field

import msgspec

from gateway.dispatch.choice import Choice
from gateway.dispatch.failover import RetryState
from gateway.dispatch.prompts import Prompt
from gateway.dispatch.run import Run
from gateway.request import Request
from gateway.text.tokenizer import SamplingDefaults
from store.records import GenerationDefaults
from workers.wire.client import Sink, WorkerClient
from workers.wire.protocol import (
    Generate,
    OutputKind,
    PromptProgress,
    SamplingParams,
    SequenceOutput,
    TokenLogprobs,
)

WHOLE_INTERVAL = 32
"""Number of tokens in each output frame of a worker if the client waits for the whole answer. If a
worker is lost, the tokens that it has not sent are generated again."""
FRAMES_AT_ONCE = 64
"""Number of frames that are built without a pause. Each takes about 15 µs."""


class PromptUsage:
    """Counter of the positions of a prompt, each counted once.

    Every sequence computes a prompt from its start, so the positions that any of them has reached
    are the first `num_reached`. If another sequence computes such a position again, or the same
    sequence does after a preemption or a move, the position is not counted again.

        choice 0, first worker   [cached | computed ...]          then the worker is lost
        choice 0, second worker  [computed .................. | computed]
        counted as                cached | computed           | computed
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_reached = 0
        """Number of positions that were computed or found in a prefix cache."""
        self.num_cached = 0
        """Number of positions that were in the prefix cache before this request."""
        self._num_tokens = num_tokens

    @property
    def is_whole(self) -> bool:
        return self.num_reached == self._num_tokens

    def note(self, event: SequenceOutput | PromptProgress) -> None:
        """Counts the positions that a worker reports for one of the prompt's sequences. A sequence
        with an output has computed its whole prompt."""
        if isinstance(event, PromptProgress):
            num_positions, num_cached = event.num_positions, event.num_cached
        else:
            num_positions, num_cached = self._num_tokens, event.num_cached_tokens
        if num_positions > self.num_reached:
            self.num_cached += max(min(num_cached, num_positions) - self.num_reached, 0)
            self.num_reached = num_positions


@dataclass(slots=True, eq=False)
class Sequence:
    """Choice of a prompt, with the worker that computes it and all that was received for it."""

    frame: Generate
    """Frame that was sent last, or that is sent next."""
    choice: Choice
    usage: PromptUsage
    """Usage of the prompt, which all choices of the prompt share."""
    worker: WorkerClient
    worker_id: str
    """Instance id of the worker when the sequence was sent."""
    id: int = 0
    """Id of the sequence in the worker's client."""
    sent_at: float = 0.0
    """Time of time.perf_counter() at which the sequence was sent last. 0 before that."""
    tokens: list[int] = field(default_factory=list[int])
    """Tokens generated so far by all its workers."""
    retries: RetryState | None = None
    """Failures of the sequence so far. None until the first failure."""
    followers: list[Sequence] = field(default_factory=list["Sequence"])
    """Other choices of the same prompt, if this sequence also scores the prompt. They are sent once
    these scores have arrived, and find the prompt in the prefix cache."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Prompt scores from the first choice, which this sequence shows with its first output."""

    def send(self, worker: WorkerClient, sink: Sink) -> None:
        """Sends the frame to a worker. Raises WorkerFailed, and then changes nothing."""
        sent_at = time.perf_counter()
        self.id = worker.send(self.frame, sink)
        self.sent_at, self.worker, self.worker_id = sent_at, worker, worker.instance_id


async def frames_of(run: Run) -> list[Generate]:
    """Returns the frame of each prompt, with all that is known before a worker is chosen. The
    Generation fills in the adapter's checksum, `max_tokens` and the time left. Lets other requests
    run after each `FRAMES_AT_ONCE` frames."""
    frames: list[Generate] = []
    for prompt in run.prompts:
        frames.append(frame_of(run, prompt))
        if len(frames) % FRAMES_AT_ONCE == 0:
            await asyncio.sleep(0)
    return frames


def sampling_params(
    request: Request, own: GenerationDefaults, defaults: SamplingDefaults
) -> SamplingParams:
    """Returns sampling parameters. Values that the caller omits come from the adapter version's
    defaults `own`, the base model's generation_config.json or OpenAI's defaults, in this order.
    `max_tokens` is what the caller asks for, or 0."""
    top_k = _first(request.top_k, own.top_k, defaults.top_k, 0)
    repetition = (request.repetition_penalty, own.repetition_penalty, defaults.repetition_penalty)
    return SamplingParams(
        max_tokens=request.max_tokens or 0,
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        temperature=_first(request.temperature, own.temperature, defaults.temperature, 1.0),
        top_k=max(int(top_k), 0),
        top_p=_first(request.top_p, own.top_p, defaults.top_p, 1.0),
        min_p=_first(request.min_p, own.min_p, defaults.min_p, 0.0),
        presence_penalty=_first(request.presence_penalty, own.presence_penalty, 0.0),
        frequency_penalty=_first(request.frequency_penalty, own.frequency_penalty, 0.0),
        repetition_penalty=_first(*repetition, 1.0),
        logit_bias=request.logit_bias,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        logprobs=request.num_logprobs,
        logprob_token_ids=request.logprob_token_ids,
        prompt_logprobs=_prompt_logprobs(request),
    )


def _prompt_logprobs(request: Request) -> int | None:
    """Returns the number of most likely tokens that workers report with each prompt token, whether
    they are shown in the echo or apart from it. Returns None if the prompt is not scored."""
    numbers = [0] if _kind(request) is OutputKind.SCORE else []
    if request.scores_echo:
        numbers.append(request.num_logprobs or 0)
    if request.num_prompt_logprobs is not None:
        numbers.append(request.num_prompt_logprobs)
    return max(numbers, default=None)


def _first(*values: float | None) -> float:
    for value in values:
        if value is not None:
            return value
    raise ValueError("all are None")


def frame_of(run: Run, prompt: Prompt) -> Generate:
    """Returns the request for a worker, without the id, which WorkerClient sets, and with an
    adapter whose checksum is not known. All keys of cached pages are derived from its fields."""
    request, target = run.request, run.target
    # A stream shows each token at once. If a stop string or a second tool call may end the answer,
    # the gateway must see each token early, so that few tokens are generated after the end.
    is_heard = request.stream or run.stops or not request.is_parallel
    kind = _kind(request)
    params = sampling_params(request, target.serving.defaults, run.tokenizer.defaults)
    # If the adapter does not act in the prompt, the prompt's pages are the base model's.
    is_adapted = prompt.activation is not None
    return Generate(
        id=0,
        request_id=run.request_id,
        model=target.base.digest,
        tokens=prompt.tokens,
        params=msgspec.structs.replace(params, rules=run.rules, stop_token_ids=run.stop_token_ids),
        kind=kind,
        cache_domain=run.caller.cache_domain,
        adapter=target.adapter_for("") if is_adapted else None,
        activation=prompt.activation or 0,
        cache_salt=(target.page_salt if is_adapted else "") + request.cache_salt,
        tenant=run.caller.tenant.id,
        weight=run.caller.service.weight,
        service_class=run.caller.service.service_class,
        priority=request.priority,
        stream_interval=1 if is_heard else WHOLE_INTERVAL,
        traceparent=run.trace.traceparent,
        grammar="" if kind is OutputKind.SCORE else run.grammar,
        pooling=run.pooling,
        labels=run.labels,
    )


def _kind(request: Request) -> OutputKind:
    """Returns the kind of output. A request for text with `max_tokens` 0 only gets the prompt's
    scores."""
    if request.kind is OutputKind.GENERATE and request.max_tokens == 0:
        return OutputKind.SCORE
    return request.kind
