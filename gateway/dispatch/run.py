"""Defines a request that is ready to run, and converts it to the form that workers expect: its
constraints, and the frame of each prompt. What determines the choice of a worker follows from the
frames."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from gateway.catalog.catalog import Principal
from gateway.catalog.resolved_model import ResolvedModel
from gateway.dispatch.prompts import Prompt
from gateway.exceptions import InvalidRequest
from gateway.limits.bounds import AnswerSize, check_answer, check_vectors, completion_tokens
from gateway.request import Request
from gateway.text.call_grammars import rules_of
from gateway.text.grammars import Grammars, GrammarUser
from gateway.text.tokenizer import ModelTokenizer, SamplingDefaults
from gateway.tracing import Untraced
from store.records import GenerationDefaults
from workers.wire.frames import OLDEST_VERSION
from workers.wire.prefix_index import Prefix
from workers.wire.protocol import (
    ALL_TOKENS,
    Generate,
    OutputKind,
    Pooling,
    SamplingParams,
    ThoughtBound,
    TokenRules,
)

MAX_BANNED_TOKENS = 4096
"""Maximum number of tokens of all banned words of a request. It is limited because the tokens are
sent with each sequence."""
WHOLE_INTERVAL = 32
"""Number of tokens in each output frame of a worker if the client waits for the whole answer. If a
worker is lost, the tokens that it has not sent are generated again."""
FRAMES_AT_ONCE = 64
"""Number of frames that are built without a pause. Each takes about 15 µs."""


class Run(msgspec.Struct, frozen=True):
    """Request that is ready to run, with all that is known about it before a worker is chosen."""

    request_id: str
    caller: Principal
    request: Request
    target: ResolvedModel
    tokenizer: ModelTokenizer
    prompts: list[Prompt]
    deadline: float
    """Time of time.perf_counter() at which the first output is due."""
    num_bytes: int
    """Size of the body in bytes."""
    started_at: float = 0.0
    """Time of time.perf_counter() at which the request arrived."""
    address: str | None = None
    """Address of the client, for the log. None if it is unknown."""
    trace: Untraced = Untraced()
    grammar: str = ""
    """Grammar that constrains the answer, as workers expect it. Empty if any text is allowed."""
    rules: TokenRules | None = None
    """Rules on the tokens that the answer may have. None if any token is allowed."""

    @property
    def stops(self) -> list[str]:
        """Stop strings of the caller and the adapter."""
        return [*self.request.stop, *self.target.serving.stop]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids of the caller's stop tokens and, unless `ignore_eos` is set, of the adapter's. Does
        not contain the base model's stop tokens."""
        if self.request.ignore_eos:
            return self.request.stop_token_ids
        return *self.request.stop_token_ids, *self.target.serving.stop_token_ids

    @property
    def labels(self) -> tuple[int, ...]:
        """Tokens whose logits make up a prompt's vector. Empty if the vector is pooled from hidden
        states."""
        return self.tokenizer.verdict_tokens if self.request.pairs else ()

    @property
    def pooling(self) -> Pooling:
        """Pooling of a prompt's vector. The adapter's setting applies first, then the base model's,
        then `LAST`."""
        if self.request.pairs:
            return Pooling.LAST
        return Pooling(self.target.serving.pooling or self.tokenizer.pooling or Pooling.LAST)

    @property
    def operation(self) -> str:
        """Operation name in OpenTelemetry's GenAI conventions."""
        if self.request.kind is OutputKind.EMBED:
            return "embeddings"
        return "text_completion" if self.request.messages is None else "chat"


class Constraints(NamedTuple):
    """Constraints on the answers of a request."""

    grammar: str
    """Grammar that constrains the text, as workers expect it. Empty if any text is allowed."""
    rules: TokenRules | None
    """Rules on the tokens that the answer may have. None if any token is allowed."""
    dropped: frozenset[str]
    """Names of schema keywords and request fields that are not enforced."""


async def constraints_of(
    request: Request,
    tokenizer: ModelTokenizer,
    prompt: Prompt,
    grammars: Grammars,
    user: GrammarUser,
) -> Constraints:
    """Returns the constraints of a request. `prompt` is any prompt of the request, because all have
    the same form. Raises InvalidRequest if a constraint cannot be used."""
    grammar, dropped = "", frozenset[str]()
    if request.constraint is not None:
        grammar, dropped = msgspec.structs.astuple(await grammars.of(request.constraint, user))
    if prompt.form is not None and (request.tools or grammar):
        in_thought = prompt.in_thought
        calls = rules_of(request, prompt.form, in_thought=in_thought, body=grammar)
        if calls is not None:
            held = await grammars.of_rules(calls, tokenizer.special_id, user)
            grammar, dropped = held.grammar, held.dropped | dropped
    rules = await token_rules(request, tokenizer, prompt, user.domain, has_grammar=bool(grammar))
    budget = request.thought_budget
    if budget is not None and budget.dropped_as and tokenizer.thought_tokens is None:
        dropped |= {budget.dropped_as}
    return Constraints(grammar, rules, dropped)


async def token_rules(
    request: Request,
    tokenizer: ModelTokenizer,
    prompt: Prompt,
    domain: str,
    *,
    has_grammar: bool,
) -> TokenRules | None:
    """Returns the request's rules on tokens, or None if any is allowed. Raises InvalidRequest."""
    if request.allowed_token_ids and has_grammar:
        raise InvalidRequest(
            "'allowed_token_ids' cannot be combined with a schema, a grammar or a call that is "
            "held to one.",
            param="allowed_token_ids",
            code="unsupported_parameter",
        )
    rules = TokenRules(
        request.allowed_token_ids,
        await _banned(request.bad_words, tokenizer, domain),
        _thought(request, tokenizer, prompt),
    )
    return None if rules == TokenRules() else rules


async def _banned(
    words: list[str], tokenizer: ModelTokenizer, domain: str
) -> tuple[tuple[int, ...], ...]:
    """Returns, for each word, the tokens that spell it at a text's beginning and after a space."""
    if not words:
        return ()
    bare = [word.lstrip() or word for word in words]
    spelled = await tokenizer.encode_many(
        [*bare, *(f" {word}" for word in bare)], domain=domain, add_special_tokens=False
    )
    banned: dict[tuple[int, ...], None] = {}
    for number, tokens in enumerate(spelled):
        # If the tokens of " word" end with the tokens of "word", banning "word" is enough.
        plain = spelled[number - len(bare)] if number >= len(bare) else []
        if tokens and not (plain and tokens[-len(plain) :] == plain):
            banned[tuple(tokens)] = None
    num_tokens = sum(map(len, banned))
    if num_tokens > MAX_BANNED_TOKENS:
        raise InvalidRequest(
            f"'bad_words' may have {MAX_BANNED_TOKENS} tokens in all; yours have {num_tokens}.",
            param="bad_words",
        )
    return tuple(banned)


def _thought(request: Request, tokenizer: ModelTokenizer, prompt: Prompt) -> ThoughtBound | None:
    budget = request.thought_budget
    if budget is None or prompt.form is None or not prompt.form.has_thoughts:
        return None
    if (markers := tokenizer.thought_tokens) is not None:
        return ThoughtBound(budget.max_tokens, *markers, is_begun=prompt.in_thought)
    if budget.dropped_as:
        return None
    raise InvalidRequest(
        "The markers of this model's thoughts are no tokens of their own, so that thoughts cannot "
        "be bounded.",
        param=budget.param,
        code="unsupported_parameter",
    )


def check_answer_of(run: Run, default_tokens: int) -> AnswerSize:
    """Returns the maximum size of the answer. Raises InvalidRequest if the answer could have too
    many log-probabilities, echoed characters or vectors. A stream's generated tokens count only if
    the stream repeats their scores at its end, or if each token has scores of the whole
    vocabulary."""
    request, num_choices = run.request, run.request.num_choices
    num_told, num_numbers = _num_told(run), 0
    if request.kind is OutputKind.EMBED and not request.pairs:
        num_numbers = check_vectors(len(run.prompts), run.target.base.shape.hidden_size, request)
    num_logprobs = num_tokens = 0
    for prompt in run.prompts:
        length = len(prompt.tokens)
        num_generated = completion_tokens(
            length, request.max_tokens, default_tokens, run.target.base.max_model_len
        )
        num_tokens += num_generated + (length if request.returns_token_ids else 0)
        if request.num_prompt_logprobs is not None:
            num_logprobs += length * (request.num_prompt_logprobs + 1)
        if request.num_logprobs is None:
            continue
        if request.scores_echo:
            num_logprobs += length * (request.num_logprobs + 1)
        if not request.stream or request.scores_texts or request.num_logprobs == ALL_TOKENS:
            num_logprobs += num_generated * (num_told + 1)
    num_echoed = sum([len(prompt.echo) for prompt in run.prompts])
    check_answer(num_logprobs * num_choices, num_echoed * num_choices)
    # Answers with vectors and relevance scores may repeat the texts of the request.
    num_repeated = run.num_bytes if request.kind is OutputKind.EMBED else 0
    return AnswerSize(
        num_choices * len(run.prompts),
        num_tokens * num_choices,
        num_logprobs * num_choices,
        num_echoed * num_choices + num_repeated,
        num_numbers,
    )


def _num_told(run: Run) -> int:
    """Returns the number of alternative tokens that are reported with each generated token."""
    request = run.request
    if request.logprob_token_ids:
        return len(request.logprob_token_ids)
    if request.num_logprobs == ALL_TOKENS:
        return run.target.base.shape.vocab_size
    return request.num_logprobs or 0


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


@dataclass(eq=False)
class Work:
    """Requirements of a request that determine which worker is chosen."""

    model: str
    """Digest of the base model."""
    adapter: str | None
    """Digest of the adapter. None for the base model alone."""
    prompts: Sequence[Prefix]
    num_sequences: int
    least_version: int = OLDEST_VERSION
    """Oldest version of the protocol that the worker may speak."""

    @staticmethod
    def of(frames: Sequence[Generate], num_choices: int = 1) -> Work:
        """Returns the requirements of one request's frames. `num_choices` is the number of
        sequences of each frame."""
        adapters = [frame.adapter.digest for frame in frames if frame.adapter is not None]
        params = frames[0].params
        return Work(
            frames[0].model,
            adapters[0] if adapters else None,
            [Prefix(frame) for frame in frames],
            len(frames) * num_choices,
            version_needed(params.logprobs, params.logprob_token_ids),
        )

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(prompt.tokens) for prompt in self.prompts)


def version_needed(logprobs: int | None, logprob_token_ids: tuple[int, ...]) -> int:
    """Returns the oldest protocol version whose workers handle a `Generate` with these parameters
    correctly. Version 6 supports neither `logprob_token_ids` nor `ALL_TOKENS`."""
    return 7 if logprob_token_ids or logprobs == ALL_TOKENS else OLDEST_VERSION
