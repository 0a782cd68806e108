"""Creates the frames of a checked request, one for each prompt, and their sequences, one for each
choice."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence

import msgspec

from gateway.dispatch.choice import Choice
from gateway.dispatch.failover import Failover
from gateway.dispatch.generation import Generation
from gateway.dispatch.placement import PromptUsage, RemoteSequence
from gateway.dispatch.prompts import Prompt
from gateway.dispatch.run import Run
from gateway.limits.admission import Reservation
from gateway.request import Request
from gateway.text.tokenizer import SamplingDefaults
from store.records import GenerationDefaults
from workers.wire.client import WorkerClient
from workers.wire.protocol import Generate, OutputKind, SamplingParams

WHOLE_INTERVAL = 32
"""Number of tokens in each output frame of a worker if the client waits for the whole answer. If a
worker is lost, the tokens that it has not sent are generated again."""
FRAMES_AT_ONCE = 64
"""Number of frames that are built without a pause. Each takes about 15 µs."""


async def frames_of(run: Run) -> list[Generate]:
    """Returns the frame of each prompt, with all that is known before a worker is chosen. `plan`
    fills in the rest. Lets other requests run after each `FRAMES_AT_ONCE` frames."""
    frames: list[Generate] = []
    for prompt in run.prompts:
        frames.append(frame_of(run, prompt))
        if len(frames) % FRAMES_AT_ONCE == 0:
            await asyncio.sleep(0)
    return frames


def plan(
    run: Run,
    frames: Sequence[Generate],
    reservation: Reservation,
    worker: WorkerClient,
    adapter_layout: str,
    failover: Failover,
) -> Generation:
    """Returns a request's generation, which is not started yet. `adapter_layout` is the layout of
    `worker`, passed separately because the worker may have been lost in the meantime."""
    adapter, timeout_s = run.target.adapter_for(adapter_layout), run.deadline - time.perf_counter()
    num_choices = run.request.num_choices
    sequences: list[RemoteSequence] = []
    for prompt, frame, max_tokens in zip(run.prompts, frames, reservation.max_tokens, strict=True):
        params = msgspec.structs.replace(
            frame.params,
            max_tokens=max_tokens,
            min_tokens=min(frame.params.min_tokens, max_tokens),
        )
        request = msgspec.structs.replace(
            frame, params=params, adapter=frame.adapter and adapter, timeout_s=timeout_s
        )
        usage = PromptUsage(len(prompt.tokens))
        for number in range(num_choices):
            if number:
                # The first choice scores the prompt for all choices.
                numbered = msgspec.structs.replace(params, choice=number, prompt_logprobs=None)
                request = msgspec.structs.replace(request, params=numbered)
            choice = Choice(run, prompt, len(sequences))
            sequences.append(RemoteSequence(request, choice, usage, worker, worker.instance_id))
        if params.prompt_logprobs is not None:
            last = len(sequences)
            sequences[-num_choices].followers = list(range(last - num_choices + 1, last))
    return Generation(run, sequences, reservation, failover)


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
        weight=run.service.weight,
        service_class=run.service.service_class,
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
