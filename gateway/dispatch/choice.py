"""One answer in the making: a sequence's tokens become text, stopped where the caller asked."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from gateway.dispatch.text_scores import TextScores
from gateway.text.parsers.parser import Parser, Part, Text, ToolCall
from gateway.text.stop_strings import StopStrings
from gateway.text.tokenizer import ModelTokenizer
from workers.wire.client import WorkerFailed
from workers.wire.protocol import ErrorCode, FinishReason, SequenceOutput, TokenLogprobs

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that calls tools."""


class ScoredToken(NamedTuple):
    """A token with its log-probability (None: the first of a prompt) and the likeliest others."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


Scored = ScoredToken | TokenLogprobs


class Delta(msgspec.Struct, frozen=True):
    """What an output added to a choice."""

    index: int
    parts: list[Part]
    scored: list[Scored]
    finish_reason: str | None
    tokens: list[int] = []
    """Generated and shown: without the end token, up to a stop string."""
    stop: str | None = None
    """The stop string that ended the choice, if one did."""
    prompt_scored: list[Scored] = []
    """The prompt's tokens, where they are told apart from the answer."""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Tokens of the choice's answer up to here, those that are not shown included."""
    vector: bytes | None = None
    """The prompt's vector, where one is asked for: float32, little-endian, not normalised."""

    @property
    def text(self) -> str:
        """The text that it added to the answer itself."""
        return "".join([part.text for part in self.parts if type(part) is Text])


class Choice:
    """`feed` it each output of its sequence until `finish_reason` is set."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        tokenizer: ModelTokenizer,
        parser: Parser,
        *,
        stops: list[str],
        min_tokens: int = 0,
        echo: str = "",
        shown: frozenset[str] | None = frozenset(),
        shows_stop: bool = False,
        num_echo_top: int | None = None,
        num_prompt_top: int | None = None,
        scores_texts: bool = False,
    ) -> None:
        """`echo` is shown before the answer, and neither searched for stop strings nor parsed.
        `shown`: special tokens that are in the text; None: all are. `shows_stop`: the stop string
        that ends the answer is in its text. `num_echo_top`: others shown beside each token of the
        echo, and `num_prompt_top` of the prompt by itself; None: not scored.
        `scores_texts`: pieces of text come with the log-probabilities of their tokens."""
        self.index = index
        self.prompt = prompt
        self.finish_reason: str | None = None
        self.num_tokens = 0
        self._parser = parser
        self._detokenizer = tokenizer.spelling.detokenizer(shown)
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = min_tokens
        self._echo = echo
        self._shows_stop = shows_stop
        self._has_calls = False
        self._num_echo_top = num_echo_top
        self._num_prompt_top = num_prompt_top
        self._scores = TextScores(tokenizer.spelling.all) if scores_texts else None

    def feed(self, output: SequenceOutput) -> Delta:
        """Raises WorkerFailed if the worker gave the sequence up."""
        if output.finish_reason is FinishReason.ABORT:
            raise WorkerFailed(ErrorCode.INTERNAL, "The worker gave this request up.")
        visible = output.tokens
        if output.stop_token is not None and visible[-1:] == [output.stop_token]:
            visible = visible[:-1]
        before = self.num_tokens
        text = self._decode(visible)
        if self.finish_reason is None:
            self.num_tokens = before + len(output.tokens)
            if output.finish_reason is not None:
                text += self._finish(output.finish_reason)
        num_shown = min(len(visible), self.num_tokens - before)
        scored = self._scored(output, num_shown)
        stop = self._stops and self._stops.matched
        if stop and self._shows_stop:
            text += stop
        parts, tokens = self._parse(text), output.tokens[: self.num_tokens - before]
        if self._scores is not None:
            parts = self._scores.told(parts, (output.logprobs or [])[:num_shown])
        return Delta(
            self.index,
            parts,
            scored,
            self.finish_reason,
            tokens,
            stop,
            self._scored_prompt(output, self._num_prompt_top),
            len(self.prompt),
            self.num_tokens,
            output.vector,
        )

    def _parse(self, text: str) -> list[Part]:
        """An answer that calls tools ends for that reason, where it would have stopped."""
        parts = self._parser.push(text)
        if self._parser.is_over and self.finish_reason is None:
            self.finish_reason = FinishReason.STOP.value
        if self.finish_reason is not None:
            parts += self._parser.finish()
        self._has_calls = self._has_calls or any(type(part) is ToolCall for part in parts)
        if self._has_calls and self.finish_reason == FinishReason.STOP.value:
            self.finish_reason = TOOL_CALLS
        if self._echo:
            parts.insert(0, Text(self._echo))
            self._echo = ""
        return parts

    def _decode(self, tokens: list[int]) -> str:
        if self._stops is None:
            return self._detokenizer.push(tokens)
        text = ""
        for token in tokens:
            self.num_tokens += 1
            text += self._search(self._detokenizer.push((token,)))
            if self._stops.matched is not None:
                self.finish_reason = FinishReason.STOP.value
                break
        return text

    def _finish(self, reason: FinishReason) -> str:
        """The text still held back; a stop string may end in it too."""
        self.finish_reason = reason.value
        text = self._detokenizer.flush()
        if self._stops is None:
            return text
        text = self._search(text)
        if self._stops.matched is not None:
            self.finish_reason = FinishReason.STOP.value
            return text
        return text + self._stops.flush()

    def _search(self, text: str) -> str:
        """A stop string does not count before `min_tokens`."""
        if self._stops is None or self.num_tokens < self._min_tokens:
            return text
        return self._stops.push(text)

    def _scored(self, output: SequenceOutput, num_shown: int) -> list[Scored]:
        scored = self._scored_prompt(output, self._num_echo_top)
        if output.logprobs is not None:
            scored.extend(output.logprobs[:num_shown])
        return scored

    def _scored_prompt(self, output: SequenceOutput, num_top: int | None) -> list[Scored]:
        """The prompt's tokens with so many likeliest others each, if they come with the output."""
        if num_top is None or output.prompt_logprobs is None:
            return []
        told = [
            ScoredToken(each.token, each.logprob, each.top[:num_top])
            for each in output.prompt_logprobs
        ]
        return [ScoredToken(self.prompt[0], None, []), *told]
