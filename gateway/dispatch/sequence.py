"""Sequences of one request, which compute its answers on workers, and the deltas of their
outputs."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import msgspec

from adapters.reference import AdapterRef
from gateway.dispatch.failover import RetryState
from gateway.dispatch.prompts import Prompt
from gateway.dispatch.run import Run
from gateway.text.detokenizer import TokenBytes
from gateway.text.parsers.parser import (
    IdentityParser,
    Parser,
    Part,
    Reasoning,
    Text,
    ToolCall,
    join_parts,
)
from gateway.text.parsers.stopping import StoppingParser
from workers.wire.client import Sink, WorkerClient, WorkerFailed
from workers.wire.protocol import (
    ErrorCode,
    FinishReason,
    Generate,
    PromptProgress,
    SequenceOutput,
    SequenceTimes,
    TokenLogprobs,
)

TOOL_CALLS = "tool_calls"
"""Finish reason of an answer that calls tools."""


class ScoredToken(NamedTuple):
    """Token with its log-probability (None for the first token of a prompt) and the most likely
    alternatives."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


Scored = ScoredToken | TokenLogprobs


class Delta(msgspec.Struct, frozen=True):
    """Text, tokens and scores that one output of a worker adds to a choice."""

    index: int
    parts: list[Part]
    scored: list[Scored]
    finish_reason: str | None
    tokens: list[int] = []
    """Generated tokens that are billed. They include the token that ended the sequence, but no
    token after a stop string."""
    stop: str | int | None = None
    """Stop string, or id of the request's stop token, that ended the choice."""
    prompt_scored: list[Scored] = []
    """Tokens of the prompt with their log-probabilities, if the request has `prompt_logprobs`."""
    prompt: list[int] = []
    """Token ids of the whole prompt, in every delta."""
    num_tokens: int = 0
    """Number of tokens of the answer so far, including tokens without visible text."""
    num_thought_tokens: int = 0
    """Number of tokens of the thought so far."""
    vector: bytes | None = None
    """Vector of the prompt, if requested: float32, little-endian, not normalised."""

    @property
    def text(self) -> str:
        """Text that this delta adds to the answer, without thoughts and calls."""
        return "".join([part.text for part in self.parts if type(part) is Text])


class Choice:
    """Answer to a prompt. `feed` takes each output of the sequence until `finish_reason` is set."""

    def __init__(self, run: Run, prompt: Prompt, index: int) -> None:
        request, spelling = run.request, run.tokenizer.spelling
        parser: Parser = IdentityParser()
        shown: frozenset[str] | None = frozenset()
        if prompt.form is not None:
            tools = request.callable_tools
            parser = prompt.form.parser(
                tools,
                is_parallel=request.is_parallel,
                must_call=request.must_call,
                in_thought=prompt.in_thought,
                continues_thought=bool(prompt.begun_thought),
            )
            shown = prompt.form.markers(tools)
        if not request.skip_special_tokens:
            shown = None
        stops = run.stops
        self.index = index
        self.prompt = prompt.tokens
        self.finish_reason: str | None = None
        self.num_tokens = 0
        self._stopping = None
        if stops:
            self._stopping = StoppingParser(parser, stops, shows_stop=request.shows_stop)
        self._parser = self._stopping or parser
        self._detokenizer = spelling.detokenizer(shown)
        self._stop_tokens = request.stop_token_ids
        self._min_tokens = request.min_tokens
        self._echo: list[Part] = [Text(prompt.echo)] if prompt.echo else []
        """Text that is shown before the answer, and thought that the answer continues. Neither is
        searched for stop strings nor parsed."""
        if request.echo and prompt.begun_thought:
            self._echo.append(Reasoning(prompt.begun_thought))
        self._has_calls = False
        self._num_echo_top = request.num_logprobs if request.scores_echo else None
        """Number of most likely tokens shown with each token of the echo. None shows no scores."""
        self._num_prompt_top = request.num_prompt_logprobs
        self._scores = TextScores(spelling.all) if request.scores_texts else None

    @property
    def num_thought_tokens(self) -> int:
        return self._parser.num_thought_tokens

    def feed(self, output: SequenceOutput) -> Delta:
        """Returns the delta of an output. Raises WorkerFailed if the worker aborted the
        sequence."""
        if output.finish_reason is FinishReason.ABORT:
            raise WorkerFailed(ErrorCode.INTERNAL, "The worker gave this request up.")
        before = self.num_tokens
        parts, self._echo = self._echo, []
        parts += self._read(output)
        stop: str | int | None = None
        if self.finish_reason is None:
            self.num_tokens = before + len(output.tokens)
            if output.finish_reason is not None:
                self.finish_reason = output.finish_reason.value
                stop = output.stop_token if output.stop_token in self._stop_tokens else None
        if self.finish_reason is not None:
            parts += self._finish()
        num_counted = self.num_tokens - before
        return Delta(
            self.index,
            join_parts(parts) if len(parts) > 1 else parts,
            self._scored(output, num_counted),
            self.finish_reason,
            output.tokens[:num_counted],
            stop if self._stopping is None else self._stopping.matched or stop,
            self._scored_prompt(output, self._num_prompt_top),
            self.prompt,
            self.num_tokens,
            self.num_thought_tokens,
            output.vector,
        )

    def _read(self, output: SequenceOutput) -> list[Part]:
        """Parses and counts the tokens before the stop token, until one of them ends the answer."""
        tokens, scored = output.tokens, output.logprobs or []
        if output.stop_token is not None and tokens[-1:] == [output.stop_token]:
            tokens = tokens[:-1]
        parts: list[Part] = []
        num_read = 0
        while num_read < len(tokens) and self.finish_reason is None:
            end = num_read + 1 if self._parser.needs_each_token else len(tokens)
            self.num_tokens += end - num_read
            if self._stopping is not None:
                self._stopping.is_searching = self.num_tokens >= self._min_tokens
            pushed = self._parser.push(self._detokenizer.push(tokens[num_read:end]))
            parts += self._told(pushed, scored[num_read:end])
            num_read = end
            if self._parser.is_over:
                self.finish_reason = FinishReason.STOP.value
        return parts

    def _finish(self) -> list[Part]:
        """Returns the parts of text that were held back until the end. Updates the finish reason,
        because a stop string may be found in these parts, and an answer that stops after tool calls
        has the finish reason `TOOL_CALLS`."""
        is_cut = self.finish_reason == FinishReason.LENGTH.value
        parts = self._told(self._parser.finish(self._detokenizer.flush(), is_cut=is_cut), [])
        if self._parser.is_over:
            self.finish_reason = FinishReason.STOP.value
        if self._has_calls and self.finish_reason == FinishReason.STOP.value:
            self.finish_reason = TOOL_CALLS
        return parts

    def _told(self, parts: list[Part], scored: list[TokenLogprobs]) -> list[Part]:
        """Returns the parts, each text with the log-probabilities of its tokens if the request sets
        `scores_texts`. Records whether any part is a tool call."""
        self._has_calls = self._has_calls or any(type(part) is ToolCall for part in parts)
        return parts if self._scores is None else self._scores.told(join_parts(parts), scored)

    def _scored(self, output: SequenceOutput, num_counted: int) -> list[Scored]:
        scored = self._scored_prompt(output, self._num_echo_top)
        if output.logprobs is not None:
            scored.extend(output.logprobs[:num_counted])
        return scored

    def _scored_prompt(self, output: SequenceOutput, num_top: int | None) -> list[Scored]:
        """Returns the prompt's tokens, each with the `num_top` most likely alternatives. Returns an
        empty list if `num_top` is None or the worker has not sent scores with this output."""
        if num_top is None or output.prompt_logprobs is None:
            return []
        told = [
            ScoredToken(each.token, each.logprob, each.top[:num_top])
            for each in output.prompt_logprobs
        ]
        return [ScoredToken(self.prompt[0], None, []), *told]


class TextScores:
    """Assignment of log-probabilities to the pieces of one answer's text. Leaves out the tokens of
    thoughts, calls and their markers.

    Tokens are matched to a piece by their bytes. If the tokens do not spell the piece, because it
    omits a special token, the piece gets all tokens since the previous piece.
    """

    def __init__(self, spelled: TokenBytes) -> None:
        """`spelled` maps token ids to bytes."""
        self._spelled = spelled
        self._open: list[TokenLogprobs] = []
        """Tokens that are not assigned to a piece yet."""

    def told(self, parts: list[Part], scored: list[TokenLogprobs]) -> list[Part]:
        """Returns the parts of a step, each text with the log-probabilities of its tokens. `scored`
        are the step's tokens with their log-probabilities."""
        self._open += scored
        told: list[Part] = []
        for part in parts:
            if isinstance(part, Text) and part.text:
                part = msgspec.structs.replace(part, scored=self._take_logprobs(part.text.encode()))
            told.append(part)
        if told and not isinstance(told[-1], Text):
            self._open.clear()
        return told

    def _take_logprobs(self, text: bytes) -> list[TokenLogprobs]:
        spelled = [self._spelled[entry.token] for entry in self._open]
        begin = b"".join(spelled).rfind(text)
        if begin < 0:
            taken, self._open = self._open, []
            return taken
        ends = list(accumulate(map(len, spelled)))
        first = bisect_right(ends, begin)
        after = bisect_left(ends, begin + len(text)) + 1
        taken, self._open = self._open[first:after], self._open[after:]
        return taken


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


class Move(NamedTuple):
    """Move of a sequence to another worker, after its worker refused it or was lost."""

    at: float
    """Time of time.perf_counter() at which the sequence was sent to the new worker."""
    from_worker: str
    to_worker: str
    reason: str
    """Error code of the failure that caused the move."""
    num_resumed: int
    """Number of tokens that the sequence had generated before the move."""


class WorkerTimes(NamedTuple):
    """Times of one sequence's stages, as reported by a worker."""

    worker_id: str
    sent_at: float
    """Time of time.perf_counter() at which the sequence was sent."""
    times: SequenceTimes
    is_last: bool
    """Whether the times were reported with the end of the sequence."""


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

    def next_frame(self, adapter: AdapterRef | None, deadline: float | None) -> Generate:
        """Returns the frame that continues the sequence after the tokens generated so far, with the
        adapter as the next worker needs it. `deadline` is the time of time.perf_counter() by which
        the request's first output is due. None if the request has an output."""
        frame, params, now = self.frame, self.frame.params, time.perf_counter()
        waited_s = frame.waited_s + (now - self.sent_at if self.sent_at else 0.0)
        if self.tokens and params.prompt_logprobs is not None:
            # The prompt is not scored again, because its scores arrived with the first token.
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(
            frame,
            params=params,
            adapter=adapter,
            tokens=[*self.choice.prompt, *self.tokens],
            num_resumed=len(self.tokens),
            timeout_s=None if deadline is None else deadline - now,
            waited_s=0.0 if deadline is None else waited_s,
        )
