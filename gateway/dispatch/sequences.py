"""Creates the sequences of a checked request, one for each choice of each prompt."""

from __future__ import annotations

import secrets
import time

import msgspec

from gateway.dispatch.choice import Choice
from gateway.dispatch.failover import Failover
from gateway.dispatch.generation import Generation
from gateway.dispatch.placement import PromptUsage, RemoteSequence
from gateway.dispatch.prompts import Prompt
from gateway.dispatch.run import Run
from gateway.dispatch.standings import Work
from gateway.limits.admission import Reservation
from gateway.request import Request
from gateway.text.tokenizer import SamplingDefaults
from store.records import GenerationDefaults, ServedVersion
from workers.wire.client import WorkerClient
from workers.wire.prefix_index import Prefix
from workers.wire.protocol import (
    Generate,
    OutputKind,
    SamplingParams,
    version_needed,
)

WHOLE_INTERVAL = 32
"""Number of tokens in each output frame of a worker if the client waits for the whole answer. If a
worker is lost, the tokens that it has not sent are generated again."""


def work_of(run: Run) -> Work:
    """Returns the request's requirements that determine which worker is chosen."""
    version = run.target.version
    prompts = [_prefix(run, prompt, version) for prompt in run.prompts]
    num_sequences = len(prompts) * run.request.num_choices
    return Work(
        run.target.base.digest,
        version and version.digest,
        prompts,
        num_sequences,
        version_needed(run.request.num_logprobs, run.request.logprob_token_ids),
    )


def _prefix(run: Run, prompt: Prompt, version: ServedVersion | None) -> Prefix:
    """Returns the key by which a prompt is found in prefix caches. Its fields must equal the fields
    of the same meaning in the result of `_generate`."""
    return Prefix(
        prompt.tokens,
        model=run.target.base.digest,
        domain=run.caller.cache_domain,
        adapter=version.digest if version and prompt.activation is not None else None,
        activation=prompt.activation or 0,
        salt=_salt(run, prompt),
    )


def _salt(run: Run, prompt: Prompt) -> str:
    """Returns the salt of the prompt's KV pages: the version's salt, if the adapter acts in the
    prompt, followed by the request's salt. If it does not act, the pages are the base model's."""
    return ("" if prompt.activation is None else run.target.page_salt) + run.request.cache_salt


def plan(
    run: Run,
    reservation: Reservation,
    worker: WorkerClient,
    adapter_layout: str,
    failover: Failover,
) -> Generation:
    """Returns a request's generation, which is not started yet. `adapter_layout` is the layout of
    `worker`, passed separately because the worker may have been lost in the meantime."""
    num_choices = run.request.num_choices
    sequences: list[RemoteSequence] = []
    for prompt, max_tokens in zip(run.prompts, reservation.max_tokens, strict=True):
        params = sampling_params(
            run.request, run.target.serving.defaults, run.tokenizer.defaults, max_tokens
        )
        params = msgspec.structs.replace(params, rules=run.rules, stop_token_ids=run.stop_token_ids)
        request = _generate(run, prompt, adapter_layout, params)
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
    request: Request, own: GenerationDefaults, defaults: SamplingDefaults, max_tokens: int
) -> SamplingParams:
    """Returns sampling parameters. Values that the caller omits come from the adapter version's
    defaults `own`, the base model's generation_config.json or OpenAI's defaults, in this order."""
    top_k = _first(request.top_k, own.top_k, defaults.top_k, 0)
    repetition = (request.repetition_penalty, own.repetition_penalty, defaults.repetition_penalty)
    return SamplingParams(
        max_tokens=max_tokens,
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
        min_tokens=min(request.min_tokens, max_tokens),
        logprobs=request.num_logprobs,
        logprob_token_ids=request.logprob_token_ids,
        prompt_logprobs=_prompt_logprobs(request, max_tokens),
    )


def _prompt_logprobs(request: Request, max_tokens: int) -> int | None:
    """Returns the number of most likely tokens that workers report with each prompt token, whether
    they are shown in the echo or apart from it. Returns None if the prompt is not scored."""
    numbers = [0] if max_tokens == 0 and request.kind is OutputKind.GENERATE else []
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


def _generate(run: Run, prompt: Prompt, layout: str, params: SamplingParams) -> Generate:
    """Returns the request for a worker. WorkerClient sets the request's id."""
    # A stream shows each token at once. If a stop string or a second tool call may end the answer,
    # the gateway must see each token early, so that few tokens are generated after the end.
    is_heard = run.request.stream or run.stops or not run.request.is_parallel
    return Generate(
        id=0,
        request_id=run.request_id,
        model=run.target.base.digest,
        tokens=prompt.tokens,
        params=params,
        kind=_kind(run.request, params),
        cache_domain=run.caller.cache_domain,
        adapter=None if prompt.activation is None else run.target.adapter_for(layout),
        activation=prompt.activation or 0,
        cache_salt=_salt(run, prompt),
        tenant=run.caller.tenant.id,
        weight=run.service.weight,
        service_class=run.service.service_class,
        priority=run.request.priority,
        timeout_s=run.deadline - time.perf_counter(),
        stream_interval=1 if is_heard else WHOLE_INTERVAL,
        traceparent=run.trace.traceparent,
        grammar=run.grammar if params.max_tokens else "",
        pooling=run.pooling,
        labels=run.labels,
    )


def _kind(request: Request, params: SamplingParams) -> OutputKind:
    """Returns the kind of output. A request for text with `max_tokens` 0 only gets the prompt's
    scores."""
    if request.kind is OutputKind.GENERATE and not params.max_tokens:
        return OutputKind.SCORE
    return request.kind
