"""The neutral request: what is asked of a model, the same for every dialect."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gateway.messages import Message
from gateway.relevance import Pair
from workers.wire.protocol import OutputKind


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON Schema of its arguments, an object."""
    strict: bool = False
    """Whether its arguments are held to the schema while they are generated."""

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        described = {"description": self.description} if self.description else {}
        function = {"name": self.name, **described, "parameters": self.parameters}
        return {"type": "function", "function": function}


class NamedTool(msgspec.Struct, frozen=True):
    """A choice of tools that asks for a call of this one."""

    name: str


class AllowedTools(msgspec.Struct, frozen=True):
    """A choice of tools that lets the answer call only some of those that are shown."""

    names: tuple[str, ...]
    must_call: bool
    """Whether the answer must call one of them."""


ToolChoice = Literal["auto", "none", "required"] | NamedTool | AllowedTools


class Constraint(msgspec.Struct, frozen=True):
    """What the answer's text is held to while it is generated."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    """The schema as JSON, the regular expression, or the grammar in llguidance's Lark syntax."""
    param: str
    """The field that a refusal names."""
    strict: bool = False
    """Of a JSON Schema: a keyword that cannot be enforced is refused, and not dropped."""


class Truncation(msgspec.Struct, frozen=True):
    """How a prompt that is too long is cut."""

    max_tokens: int
    """Tokens that are kept, special tokens of the tokenizer included; -1: as many as the context
    has room for."""
    side: Literal["left", "right"]
    """Where tokens are left out: at the beginning, or at the end. Of a pair, the document's."""
    param: str = "truncate_prompt_tokens"
    """The field that a refusal names."""


class ThoughtBudget(msgspec.Struct, frozen=True):
    """How many tokens the thought before an answer may have."""

    max_tokens: int
    param: str
    """The field that a refusal names."""
    is_wish: bool = False
    """Whether it is dropped, and named, for a model whose thoughts cannot be bounded."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request for generated text. None: the adapter's default, the model's, or ours.

    Either `messages` is set, a conversation for the chat template, or `prompts` has an entry a
    prompt, each text or token ids.
    """

    model: str
    messages: list[Message] | None = None
    prompts: list[str | list[int]] = []
    kind: OutputKind = OutputKind.GENERATE
    """`generate`: text; with `echo`, scores of the prompts too. `embed`: a vector of each prompt;
    `max_tokens` is 0."""
    pairs: list[Pair] = []
    """For kind `embed`, in place of prompts: each is a question for the chat template, and its
    vector has the logits of the answers no and yes."""
    dimensions: int | None = None
    """For kind `embed`: the leading numbers of each vector that are shown; None: all."""
    dimensions_param: str = "dimensions"
    """Field of the body that they came from, for errors."""
    prompts_param: str = "prompt"
    """Field of the body that the prompts came from, for errors."""
    echo: bool = False
    """Whether each prompt is shown, and scored if log-probabilities are asked for, before its
    answer. With `messages`: whether the content that the answer goes on with is shown."""
    num_prompt_logprobs: int | None = None
    """Likeliest tokens told beside each one of the prompt, apart from the answer; None: none."""
    truncation: Truncation | None = None
    """None: a prompt that is too long is refused."""
    max_document_tokens: int | None = None
    """For pairs: tokens that each document keeps, from its beginning; None: all."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens. None: to texts, and not to what a chat
    template has written."""
    stream: bool = False
    num_choices: int = 1
    """Answers to each prompt."""
    max_tokens: int | None = None
    """Cut to the room that the prompt leaves in the context."""
    max_tokens_param: str = "max_tokens"
    """Field of the body that it came from."""
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] = ()
    """Only these tokens are generated; empty: any."""
    bad_words: list[str] = []
    """Texts that are not generated."""
    thought_budget: ThoughtBudget | None = None
    seed: int | None = None
    num_logprobs: int | None = None
    """Likeliest tokens shown beside each one; 0: the token's own log-probability; `ALL_TOKENS`: all
    of the vocabulary; None: none."""
    logprob_token_ids: tuple[int, ...] = ()
    """With `num_logprobs`: the tokens shown beside each one, in place of the likeliest."""
    scores_texts: bool = False
    """Whether each piece of the answer's text comes with the log-probabilities of its tokens, which
    the end of a stream repeats."""
    priority: int = 0
    cache_salt: str = ""
    tools: list[Tool] = []
    tool_choice: ToolChoice = "auto"
    """With `tools`: whether the answer may, may not or must call one."""
    is_parallel: bool = True
    """Whether an answer may have more calls than one."""
    constraint: Constraint | None = None
    add_generation_prompt: bool = True
    """With `messages`: whether the prompt ends with the beginning of an answer."""
    continue_final_message: bool = False
    """With `messages`: whether the answer goes on with the last one's content."""
    template_arguments: dict[str, Any] = {}
    """Further variables of the chat template."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    shows_stop: bool = False
    """Whether the stop string that ends an answer is in its text."""
    user: str | None = None
    """Splits canaries; None: the API key does."""
    dropped: tuple[str, ...] = ()
    """What was taken without effect: the answer's header `loraplex-dropped` names it."""

    @property
    def scores_echo(self) -> bool:
        """Whether the prompts that are shown have log-probabilities."""
        return self.echo and self.messages is None and self.num_logprobs is not None


def shown_tools(asked: GenerationRequest) -> list[Tool]:
    """The tools that the chat template is given."""
    return [] if asked.tool_choice == "none" else asked.tools


def callable_tools(asked: GenerationRequest) -> list[Tool]:
    """The tools that the answer may call."""
    if isinstance(asked.tool_choice, AllowedTools):
        return [tool for tool in asked.tools if tool.name in asked.tool_choice.names]
    return shown_tools(asked)


def must_call(asked: GenerationRequest) -> bool:
    """Whether the answer is held to calls of tools."""
    if isinstance(asked.tool_choice, AllowedTools):
        return asked.tool_choice.must_call
    return asked.tool_choice not in ("auto", "none")
