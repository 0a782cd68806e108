"""Creates the sequences of a checked request, one for each choice of each prompt."""

from __future__ import annotations

import secrets
import time

import msgspec

from gateway.catalog.auth import Principal
from gateway.catalog.resolved_model import ResolvedModel
from gateway.dispatch.choice import Choice
from gateway.dispatch.failover import Failover
from gateway.dispatch.generation import Generation
from gateway.dispatch.prompts import Prompt
from gateway.dispatch.routing import Work
from gateway.generation_request import GenerationRequest, callable_tools, must_call
from gateway.limits.admission import Reservation
from gateway.limits.bounds import check_answer, check_vectors, completion_tokens
from gateway.quota_types import ORDINARY, Service
from gateway.text.parsers.parser import IdentityParser, Parser
from gateway.text.tokenizer import ModelTokenizer, SamplingDefaults
from gateway.tracing import Untraced
from store.records import GenerationDefaults, ServedVersion
from workers.wire.client import WorkerClient
from workers.wire.prefix_index import Prefix
from workers.wire.protocol import (
    ALL_TOKENS,
    Generate,
    OutputKind,
    Pooling,
    SamplingParams,
    TokenRules,
    version_needed,
)

WHOLE_INTERVAL = 32
"""Number of tokens in each output frame of a worker if the client waits for the whole answer. If a
worker is lost, the tokens that it has not sent are generated again."""


class Call(msgspec.Struct, frozen=True):
    """Everything known about a request when its sequences are created."""

    request_id: str
    caller: Principal
    asked: GenerationRequest
    target: ResolvedModel
    tokenizer: ModelTokenizer
    prompts: list[Prompt]
    deadline: float
    """Time of time.perf_counter() at which the first output is due."""
    num_bytes: int
    """Size of the body in bytes."""
    trace: Untraced = Untraced()
    service: Service = ORDINARY
    grammar: str = ""
    """Grammar that constrains the answer, in the form for workers. Empty if any text is allowed."""
    rules: TokenRules | None = None
    """Rules on the tokens that the answer may have. None allows any."""

    @property
    def stops(self) -> list[str]:
        """Stop strings of the caller and the adapter."""
        return [*self.asked.stop, *self.target.serving.stop]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Token ids that end answers because the caller or the adapter says so, in addition to the
        base model's."""
        if self.asked.ignore_eos:
            return self.asked.stop_token_ids
        return *self.asked.stop_token_ids, *self.target.serving.stop_token_ids

    @property
    def labels(self) -> tuple[int, ...]:
        """Tokens whose logits make up a prompt's vector. Empty if the vector is pooled from hidden
        states."""
        return self.tokenizer.verdict_tokens if self.asked.pairs else ()

    @property
    def pooling(self) -> Pooling:
        """Pooling of a prompt's vector. The adapter's setting applies first, then the base model's,
        then `LAST`."""
        if self.asked.pairs:
            return Pooling.LAST
        return Pooling(self.target.serving.pooling or self.tokenizer.pooling or Pooling.LAST)


def operation(call: Call) -> str:
    """Returns the request's operation name in OpenTelemetry's GenAI conventions."""
    if call.asked.kind is OutputKind.EMBED:
        return "embeddings"
    return "text_completion" if call.asked.messages is None else "chat"


def check_answer_of(call: Call, default_tokens: int) -> None:
    """Raises InvalidRequest if the answer could be too large. Generated tokens of a stream do not
    count, because they are sent at once, unless the end of the stream repeats them."""
    asked, num_choices = call.asked, call.asked.num_choices
    num_told = _num_told(call)
    if asked.kind is OutputKind.EMBED and not asked.pairs:
        check_vectors(len(call.prompts), call.target.base.shape.hidden_size, asked)
    num_logprobs = 0
    for prompt in call.prompts:
        length = len(prompt.tokens)
        if asked.num_prompt_logprobs is not None:
            num_logprobs += length * (asked.num_prompt_logprobs + 1)
        if asked.num_logprobs is None:
            continue
        if asked.scores_echo:
            num_logprobs += length * (asked.num_logprobs + 1)
        if not asked.stream or asked.scores_texts or asked.num_logprobs == ALL_TOKENS:
            num_scored = completion_tokens(
                length, asked.max_tokens, default_tokens, call.target.base.max_model_len
            )
            num_logprobs += num_scored * (num_told + 1)
    num_echoed = sum([len(prompt.echo) for prompt in call.prompts])
    check_answer(num_logprobs * num_choices, num_echoed * num_choices)


def _num_told(call: Call) -> int:
    """Returns the number of alternative tokens that are reported with each generated token."""
    asked = call.asked
    if asked.logprob_token_ids:
        return len(asked.logprob_token_ids)
    if asked.num_logprobs == ALL_TOKENS:
        return call.target.base.shape.vocab_size
    return asked.num_logprobs or 0


def work_of(call: Call) -> Work:
    """Returns the request's requirements, by which a worker is chosen."""
    version = call.target.version
    prompts = [_prefix(call, prompt, version) for prompt in call.prompts]
    num_sequences = len(prompts) * call.asked.num_choices
    return Work(
        call.target.base.digest,
        version and version.digest,
        prompts,
        num_sequences,
        version_needed(call.asked.num_logprobs, call.asked.logprob_token_ids),
    )


def _prefix(call: Call, prompt: Prompt, version: ServedVersion | None) -> Prefix:
    """Returns the prefix of a prompt. It must have the same fields as the request of
    `_generate`."""
    return Prefix(
        prompt.tokens,
        model=call.target.base.digest,
        domain=call.caller.cache_domain,
        adapter=version.digest if version and prompt.activation is not None else None,
        activation=prompt.activation or 0,
        salt=_salt(call, prompt),
    )


def _salt(call: Call, prompt: Prompt) -> str:
    """Returns the salt of the prompt's KV pages: the request's own salt, after the version's salt
    if the adapter acts in the prompt. If it does not act, the pages are the base model's."""
    return ("" if prompt.activation is None else call.target.page_salt) + call.asked.cache_salt


def plan(
    call: Call,
    reservation: Reservation,
    worker: WorkerClient,
    adapter_layout: str,
    failover: Failover,
) -> Generation:
    """Returns a request's generation, which is not started yet. `adapter_layout` is the layout of
    `worker`, passed separately because the worker may have been lost in the meantime."""
    num_choices = call.asked.num_choices
    requests: list[Generate] = []
    choices: list[Choice] = []
    for prompt, max_tokens in zip(call.prompts, reservation.max_tokens, strict=True):
        params = sampling_params(
            call.asked, call.target.serving.defaults, call.tokenizer.defaults, max_tokens
        )
        params = msgspec.structs.replace(
            params, rules=call.rules, stop_token_ids=call.stop_token_ids
        )
        request = _generate(call, prompt, adapter_layout, params)
        for number in range(num_choices):
            if number:
                # The first choice scores the prompt for all.
                numbered = msgspec.structs.replace(params, choice=number, prompt_logprobs=None)
                request = msgspec.structs.replace(request, params=numbered)
            requests.append(request)
            choices.append(_choice(call, prompt, len(choices)))
    return Generation(
        worker,
        requests,
        choices,
        reservation,
        failover,
        num_choices=num_choices,
        adapter_for=call.target.adapter_for,
        deadline=call.deadline,
        num_bytes=call.num_bytes,
    )


def sampling_params(
    asked: GenerationRequest, own: GenerationDefaults, defaults: SamplingDefaults, max_tokens: int
) -> SamplingParams:
    """Returns sampling parameters. Values that the caller omits come from the adapter version's
    defaults `own`, the base model's generation_config.json or OpenAI's defaults, in this order."""
    top_k = _first(asked.top_k, own.top_k, defaults.top_k, 0)
    repetition = (asked.repetition_penalty, own.repetition_penalty, defaults.repetition_penalty)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
        temperature=_first(asked.temperature, own.temperature, defaults.temperature, 1.0),
        top_k=max(int(top_k), 0),
        top_p=_first(asked.top_p, own.top_p, defaults.top_p, 1.0),
        min_p=_first(asked.min_p, own.min_p, defaults.min_p, 0.0),
        presence_penalty=_first(asked.presence_penalty, own.presence_penalty, 0.0),
        frequency_penalty=_first(asked.frequency_penalty, own.frequency_penalty, 0.0),
        repetition_penalty=_first(*repetition, 1.0),
        logit_bias=asked.logit_bias,
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
        min_tokens=min(asked.min_tokens, max_tokens),
        logprobs=asked.num_logprobs,
        logprob_token_ids=asked.logprob_token_ids,
        prompt_logprobs=_prompt_logprobs(asked, max_tokens),
    )


def _prompt_logprobs(asked: GenerationRequest, max_tokens: int) -> int | None:
    """Returns the number of most likely tokens that workers report with each prompt token, whether
    they are shown in the echo or apart from it. Returns None if the prompt is not scored."""
    numbers = [0] if max_tokens == 0 and asked.kind is OutputKind.GENERATE else []
    if asked.scores_echo:
        numbers.append(asked.num_logprobs or 0)
    if asked.num_prompt_logprobs is not None:
        numbers.append(asked.num_prompt_logprobs)
    return max(numbers, default=None)


def _first(*values: float | None) -> float:
    for value in values:
        if value is not None:
            return value
    raise ValueError("all are None")


def _generate(call: Call, prompt: Prompt, layout: str, params: SamplingParams) -> Generate:
    """Returns the request for a worker. The client sets its id."""
    # If a stop string or a second call may end the answer, each token is checked before the next is
    # generated.
    is_heard = call.asked.stream or call.stops or not call.asked.is_parallel
    return Generate(
        id=0,
        request_id=call.request_id,
        model=call.target.base.digest,
        tokens=prompt.tokens,
        params=params,
        kind=_kind(call.asked, params),
        cache_domain=call.caller.cache_domain,
        adapter=None if prompt.activation is None else call.target.adapter_for(layout),
        activation=prompt.activation or 0,
        cache_salt=_salt(call, prompt),
        tenant=call.caller.tenant.id,
        weight=call.service.weight,
        service_class=call.service.service_class,
        priority=call.asked.priority,
        timeout_s=call.deadline - time.perf_counter(),
        stream_interval=1 if is_heard else WHOLE_INTERVAL,
        traceparent=call.trace.traceparent,
        grammar=call.grammar if params.max_tokens else "",
        pooling=call.pooling,
        labels=call.labels,
    )


def _kind(asked: GenerationRequest, params: SamplingParams) -> OutputKind:
    """Returns the kind of output. A request for text with `max_tokens` 0 only gets the prompt's
    scores."""
    if asked.kind is OutputKind.GENERATE and not params.max_tokens:
        return OutputKind.SCORE
    return asked.kind


def _choice(call: Call, prompt: Prompt, index: int) -> Choice:
    form, tools = prompt.form, callable_tools(call.asked)
    parser: Parser = IdentityParser()
    shown: frozenset[str] | None = frozenset()
    if form is not None:
        parser = form.parser(
            tools,
            is_parallel=call.asked.is_parallel,
            must_call=must_call(call.asked),
            in_thought=prompt.in_thought,
        )
        shown = form.markers(tools)
    if not call.asked.skip_special_tokens:
        shown = None
    return Choice(
        index,
        prompt.tokens,
        call.tokenizer,
        parser,
        stops=call.stops,
        stop_tokens=call.asked.stop_token_ids,
        min_tokens=call.asked.min_tokens,
        echo=prompt.echo,
        shown=shown,
        shows_stop=call.asked.shows_stop,
        num_echo_top=call.asked.num_logprobs if call.asked.scores_echo else None,
        num_prompt_top=call.asked.num_prompt_logprobs,
        scores_texts=call.asked.scores_texts,
    )
