"""Converts a request's texts, token ids and messages to prompts. Checks sizes before it renders,
tokenises or detokenises anything. Processes large texts in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.catalog.catalog import Principal
from gateway.catalog.resolved_model import ResolvedModel
from gateway.exceptions import ContextLengthExceeded, InvalidRequest
from gateway.limits.bounds import (
    MAX_TOKEN_IDS,
    check_template_arguments,
    check_tools,
    check_total,
    completion_tokens,
)
from gateway.request import Conversation, Message, Pair, Request
from gateway.text.parsers.answer_form import AnswerForm
from gateway.text.parsers.stopping import failure_function
from gateway.text.parsers.thoughts import OPEN, begun_thought, ends_with, is_in_thought
from gateway.text.sliced_encoder import Kept
from gateway.text.tokenizer import ChatTokens, ModelTokenizer

TAIL_TOKENS = 16
"""Number of tokens at the end of a prompt that are searched for the beginning of a thought."""
WITHOUT_THINKING: dict[str, Any] = {"enable_thinking": False}
"""Template variables that make a chat template skip the thought, if it knows `enable_thinking`."""


def find_activation(tokens: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Returns the start of the last occurrence of the adapter's invocation in a prompt.

    Returns 0 if the invocation is empty, because an ordinary adapter acts from the start. Returns
    None if the prompt does not contain the invocation. Then only the base model answers, and
    generated tokens do not activate the adapter, as in peft. Takes linear time for any input
    (Knuth-Morris-Pratt, from the end).
    """
    if not invocation:
        return 0
    word = invocation[::-1]
    failure = failure_function(word)
    matched = 0
    for position in range(len(tokens) - 1, -1, -1):
        token = tokens[position]
        while matched and token != word[matched]:
            matched = failure[matched - 1]
        if token == word[matched]:
            matched += 1
            if matched == len(word):
                return position
    return None


class Prompt(msgspec.Struct, frozen=True):
    tokens: list[int]
    echo: str = ""
    """Text that is shown before the answer."""
    activation: int | None = 0
    """Position from which the adapter acts. None if it does not act in this prompt."""
    form: AnswerForm | None = None
    """Form of calls and thoughts in the answer. None if it is plain text."""
    change: str = ""
    """How the prompt differs from the turns of a conversation (see `Rendered`), or empty."""
    in_thought: bool = False
    """Whether the prompt ends inside a thought."""
    begun_thought: str = ""
    """Text of the last message's thought that the answer continues. Empty if there is none."""


async def encode_prompts(
    tokenizer: ModelTokenizer, target: ResolvedModel, request: Request, caller: Principal
) -> list[Prompt]:
    """Returns the request's prompts as token ids. Raises InvalidRequest or TemplateNotApproved."""
    check_ids(request, target)
    check_tools(request.tools, request.tool_choice, request.dropped)
    check_template_arguments(request.template_arguments)
    reader = _PromptReader(tokenizer, target, request, caller.cache_domain)
    if request.pairs:
        return await reader.of_pairs()
    if request.messages is not None:
        return await reader.of_chat(request.messages)
    return await reader.of_texts()


class _PromptReader:
    """Reader of the prompts of one request."""

    def __init__(
        self, tokenizer: ModelTokenizer, target: ResolvedModel, request: Request, domain: str
    ) -> None:
        self._tokenizer = tokenizer
        self._target = target
        self._request = request
        self._domain = domain
        self._max_model_len = target.base.max_model_len
        self._max_tokens = None if request.truncation else self._max_model_len
        """Maximum tokens of a prompt. None if longer prompts are truncated, not refused."""

    async def of_chat(self, messages: list[Message]) -> list[Prompt]:
        """Returns the prompt of a conversation."""
        tokenizer, request, target = self._tokenizer, self._request, self._target
        num_chars = sum([message.num_chars for message in messages])
        tokenizer.check_chars(num_chars, self._max_model_len)
        has_special_tokens = bool(request.add_special_tokens)
        kept = self._kept(has_special_tokens=has_special_tokens)
        tokens, change, form = await self._encode_chat(request.conversation, kept)
        check_total([len(tokens)], request.num_choices, self._max_model_len, param="n")
        if target.serving.tool_format is not None:
            form = msgspec.structs.replace(form, calls=target.serving.tool_format)
        end, last = tokenizer.text(tokens[-TAIL_TOKENS:]), messages[-1]
        thought = ""
        if form.has_thoughts and request.conversation.continue_final_message:
            thought = begun_thought(last)
            if not ends_with(end, thought):  # the template has closed the thought
                thought = ""
        in_thought = form.has_thoughts and (bool(thought) or is_in_thought(end))
        echo = last.content.removesuffix(OPEN + thought) if thought else last.content
        echoed = [echo] if request.echo and last.role == "assistant" else []
        return [
            msgspec.structs.replace(
                each, form=form, in_thought=in_thought, begun_thought=thought, change=change
            )
            for each in await self._prompts([tokens], echoed)
        ]

    async def of_pairs(self) -> list[Prompt]:
        """Returns one prompt for each pair. Yields to the event loop after each prompt."""
        tokenizer, request, most = self._tokenizer, self._request, self._most_tokens()
        pairs, cut = request.pairs, request.truncation
        self._check_total([min(most, tokenizer.fewest_tokens(each.num_chars)) for each in pairs])
        for pair in pairs:
            tokenizer.check_chars(pair.num_chars, self._max_model_len)
        prompts: list[list[int]] = []
        num_tokens = 0
        for pair in pairs:
            kept: list[int] = []
            if request.max_document_tokens is not None:
                kept, pair = await self._with_part(pair, Kept(request.max_document_tokens, "right"))
            if cut is not None:
                kept, pair = await self._with_part(pair, Kept(most, cut.side))
            tokens = await self._encode_pair(pair, most + len(kept))
            while cut is not None and len(tokens) > most:
                num_kept = len(kept) - (len(tokens) - most)
                if num_kept < 1:
                    raise InvalidRequest(
                        f"The question without its document has {most} tokens or more, which "
                        f"'{cut.param}' does not allow.",
                        param=cut.param,
                    )
                kept = Kept(num_kept, cut.side).of(kept)
                pair = pair.with_document(tokenizer.text(kept))
                tokens = await self._encode_pair(pair, most + len(kept))
            prompts.append(tokens)
            num_tokens += len(tokens)
            self._check_total([num_tokens])
            await asyncio.sleep(0)
        return await self._prompts(prompts, [])

    async def _with_part(self, pair: Pair, kept: Kept) -> tuple[list[int], Pair]:
        """Returns the pair with a truncated document, and the document's tokens."""
        one_more = kept._replace(num_tokens=kept.num_tokens + 1)
        (tokens,) = await self._tokenizer.encode_many(
            [pair.document], domain=self._domain, add_special_tokens=False, kept=one_more
        )
        if len(tokens) > kept.num_tokens:
            tokens = kept.of(tokens)
            pair = pair.with_document(self._tokenizer.text(tokens))
        return tokens, pair

    async def of_texts(self) -> list[Prompt]:
        """Returns the prompts of texts and token ids."""
        tokenizer, request, given = self._tokenizer, self._request, self._request.prompts
        most, has_special_tokens = self._most_tokens(), request.add_special_tokens is not False
        fewest = [
            min(most, tokenizer.fewest_tokens(len(each)) if isinstance(each, str) else len(each))
            for each in given
        ]
        self._check_total(fewest)
        texts = [each for each in given if isinstance(each, str)]
        tokenizer.check_chars(max(map(len, texts), default=0), self._max_model_len)
        cut = [self._shortened(each) for each in given if not isinstance(each, str)]
        num_given = sum(map(len, cut))
        encoded = iter(
            await tokenizer.encode_many(
                texts,
                domain=self._domain,
                add_special_tokens=has_special_tokens,
                max_tokens=self._max_tokens,
                kept=self._kept(has_special_tokens=has_special_tokens) if texts else None,
                check_sum=lambda num_tokens: self._check_total([num_given + num_tokens]),
            )
        )
        ids = iter(cut)
        prompts = [next(encoded) if isinstance(each, str) else next(ids) for each in given]
        lengths = [len(prompt) for prompt in prompts]
        self._check_total(lengths)
        for length in lengths:
            completion_tokens(length, request.max_tokens, 1, self._max_model_len)
        echoed = (prompts if request.truncation else given) if request.echo else []
        return await self._prompts(prompts, echoed)

    async def _encode_chat(
        self, conversation: Conversation, kept: Kept | None = None
    ) -> ChatTokens:
        return await self._tokenizer.encode_chat(
            conversation,
            domain=self._domain,
            template=self._target.chat_template(),
            max_tokens=self._max_tokens,
            add_special_tokens=bool(self._request.add_special_tokens),
            kept=kept,
        )

    async def _encode_pair(self, pair: Pair, max_tokens: int) -> list[int]:
        """Returns a pair's prompt. If the request truncates prompts, returns at most `max_tokens`
        tokens."""
        question = Conversation(pair.messages(), template_arguments=WITHOUT_THINKING)
        kept = None if self._request.truncation is None else Kept(max_tokens, "right")
        return (await self._encode_chat(question, kept)).tokens

    def _check_total(self, lengths: Sequence[int]) -> None:
        request = self._request
        check_total(lengths, request.num_choices, self._max_model_len, param=request.prompts_param)

    def _most_tokens(self) -> int:
        """Returns the maximum number of tokens of a truncated prompt. If prompts are not truncated,
        this is `MAX_TOKEN_IDS`, because long prompts are then refused elsewhere."""
        request, max_model_len = self._request, self._max_model_len
        if request.truncation is None:
            return MAX_TOKEN_IDS
        if request.truncation.max_tokens > 0:
            return request.truncation.max_tokens
        room = max_model_len - (1 if request.max_tokens is None else request.max_tokens)
        if room < 1:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {max_model_len} tokens, and "
                f"'{request.max_tokens_param}' of {request.max_tokens} leaves no room for a prompt."
            )
        return room

    def _kept(self, *, has_special_tokens: bool) -> Kept | None:
        """Returns which tokens of each text are kept, in addition to the special tokens that the
        tokenizer adds. Returns None if texts are not truncated. Raises InvalidRequest if the
        special tokens leave no room for others."""
        cut = self._request.truncation
        if cut is None:
            return None
        num_added = self._tokenizer.num_added_tokens if has_special_tokens else 0
        room = self._most_tokens() - num_added
        if room < 1:
            raise InvalidRequest(
                f"'{cut.param}' must be above {num_added}, the number of special tokens around a "
                "prompt of this model.",
                param=cut.param,
            )
        return Kept(room, cut.side)

    def _shortened(self, tokens: list[int]) -> list[int]:
        """Returns a prompt's token ids, truncated as the request asks."""
        kept = self._kept(has_special_tokens=False)
        return tokens if kept is None else kept.of(tokens)

    async def _prompts(
        self, tokenised: list[list[int]], echoed: Sequence[str | list[int]]
    ) -> list[Prompt]:
        """Returns the prompts of tokenised texts. `echoed` has the text or the token ids that are
        shown before the answers to each prompt. It is empty if nothing is shown. Raises
        InvalidRequest if a prompt is empty or has an id outside the vocabulary."""
        size, param = self._target.base.shape.vocab_size, self._request.prompts_param
        for tokens in tokenised:
            if not tokens:
                raise InvalidRequest(f"The {param} is empty.", param=param)
            if max(tokens) >= size:
                raise InvalidRequest(
                    f"'{param}' has the token id {max(tokens)}; this model's ids are below {size}. "
                    "Send texts, or ids of this model's tokenizer (POST /tokenize). LangChain's "
                    "OpenAIEmbeddings sends ids of tiktoken unless 'check_embedding_ctx_length' is "
                    "False.",
                    param=param,
                )

        def make() -> list[Prompt]:
            decode = self._tokenizer.text
            echoes = [each if isinstance(each, str) else decode(each) for each in echoed]
            return [
                make_prompt(self._target, tokens, echo)
                for tokens, echo in zip(tokenised, echoes or [""] * len(tokenised), strict=True)
            ]

        if not echoed and not invocation_of(self._target):
            return make()
        return await self._tokenizer.work_on(tokenised, self._domain, make)


def check_ids(request: Request, target: ResolvedModel) -> None:
    """Raises InvalidRequest if a parameter has a token id that the model does not have."""
    size = target.base.shape.vocab_size
    for param, ids in (
        ("logit_bias", request.logit_bias),
        ("stop_token_ids", request.stop_token_ids),
        ("allowed_token_ids", request.allowed_token_ids),
        ("logprob_token_ids", request.logprob_token_ids),
    ):
        if ids and (highest := max(ids)) >= size:
            raise InvalidRequest(
                f"'{param}' names the token id {highest}; this model's ids are below {size}.",
                param=param,
            )


def make_prompt(target: ResolvedModel, tokens: list[int], echo: str = "") -> Prompt:
    """Returns the prompt with the position from which the target's adapter acts."""
    return Prompt(tokens, echo, find_activation(tokens, invocation_of(target)))


def invocation_of(target: ResolvedModel) -> tuple[int, ...]:
    """Returns the invocation tokens of the target's adapter. Empty for an ordinary adapter."""
    return () if target.version is None else target.version.invocation_tokens
