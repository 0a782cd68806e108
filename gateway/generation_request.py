"""Neutral request for a model, the same for every dialect."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gateway.messages import Message
from gateway.relevance import Pair
from workers.wire.protocol import OutputKind


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """Function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON Schema of the arguments, an object."""
    strict: bool = False
    """Whether arguments are constrained to the schema during generation."""

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect."""
        described = {"description": self.description} if self.description else {}
        function = {"name": self.name, **described, "parameters": self.parameters}
        return {"type": "function", "function": function}


class NamedTool(msgspec.Struct, frozen=True):
    """Choice of tools that requires a call of this one."""

    name: str


class AllowedTools(msgspec.Struct, frozen=True):
    """Choice of tools that allows calls of only some of those that are shown."""

    names: tuple[str, ...]
    must_call: bool
    """Whether the answer must call one of them."""


ToolChoice = Literal["auto", "none", "required"] | NamedTool | AllowedTools


class Constraint(msgspec.Struct, frozen=True):
    """Constraint of the answer's text during generation."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    """Schema as JSON, regular expression, or grammar in llguidance's Lark syntax."""
    param: str
    """Field that a refusal names."""
    strict: bool = False
    """Whether a JSON Schema's keyword that cannot be enforced is refused instead of dropped."""


class Truncation(msgspec.Struct, frozen=True):
    """Truncation of a long prompt."""

    max_tokens: int
    """Maximum tokens kept, including the tokenizer's special tokens. -1 keeps as many as the
    context has room for."""
    side: Literal["left", "right"]
    """Side at which tokens are cut. For a pair, those of the document."""
    param: str = "truncate_prompt_tokens"
    """Field that a refusal names."""


class ThoughtBudget(msgspec.Struct, frozen=True):
    """Maximum number of tokens of the thought before an answer."""

    max_tokens: int
    param: str
    """Field that a refusal names."""
    is_wish: bool = False
    """Whether the budget is dropped, and named, if the model's thoughts cannot be limited."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Checked request for generated text. A field that is None takes the default of the adapter,
    the model or the gateway. Either `messages` is set, or `prompts` has one entry for each prompt,
    as text or token ids."""

    model: str
    messages: list[Message] | None = None
    prompts: list[str | list[int]] = []
    kind: OutputKind = OutputKind.GENERATE
    """`generate`: text and, with `echo`, scores of the prompts. `embed`: a vector of each prompt,
    with `max_tokens` 0."""
    pairs: list[Pair] = []
    """Alternative to prompts for kind `embed`: each pair is a question for the chat template, and
    its vector has the logits of the answers no and yes."""
    dimensions: int | None = None
    """Number of leading dimensions kept of each vector, for kind `embed`. None keeps all."""
    dimensions_param: str = "dimensions"
    """Field of the body that `dimensions` came from, for errors."""
    prompts_param: str = "prompt"
    """Field of the body that the prompts came from, for errors."""
    echo: bool = False
    """Whether each prompt is shown before its answer, and scored if log-probabilities are
    requested. With `messages`, whether the content that the answer continues is shown."""
    num_prompt_logprobs: int | None = None
    """Number of likeliest tokens returned with each prompt token, apart from the answer. None:
    none."""
    truncation: Truncation | None = None
    """None refuses long prompts."""
    max_document_tokens: int | None = None
    """Maximum tokens kept from the beginning of each document of a pair. None keeps all."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens. None adds them to texts, but not to a chat
    template's output."""
    stream: bool = False
    num_choices: int = 1
    """Number of answers to each prompt."""
    max_tokens: int | None = None
    """Cut to the room that the prompt leaves in the context."""
    max_tokens_param: str = "max_tokens"
    """Field of the body that `max_tokens` came from."""
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
    """Only these tokens are generated. Empty allows all."""
    bad_words: list[str] = []
    thought_budget: ThoughtBudget | None = None
    seed: int | None = None
    num_logprobs: int | None = None
    """Number of likeliest tokens shown with each token. 0 shows only the token's own
    log-probability, `ALL_TOKENS` the whole vocabulary, None none."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens shown with each token instead of the likeliest, if `num_logprobs` is set."""
    scores_texts: bool = False
    """Whether each piece of the answer's text has its tokens' log-probabilities, which the end of a
    stream repeats."""
    priority: int = 0
    cache_salt: str = ""
    tools: list[Tool] = []
    tool_choice: ToolChoice = "auto"
    """Whether the answer may, may not or must call one of the `tools`."""
    is_parallel: bool = True
    """Whether an answer may have several calls."""
    constraint: Constraint | None = None
    add_generation_prompt: bool = True
    """Whether the prompt of `messages` ends with the beginning of an answer."""
    continue_final_message: bool = False
    """Whether the answer continues the content of the last of the `messages`."""
    template_arguments: dict[str, Any] = {}
    """Further variables of the chat template."""
    skip_special_tokens: bool = True
    """Whether the text omits special tokens."""
    shows_stop: bool = False
    """Whether the text includes the stop string that ended the answer."""
    user: str | None = None
    """Key by which a canary splits requests. None uses the API key."""
    dropped: tuple[str, ...] = ()
    """Fields without effect, which the answer's header `loraplex-dropped` names."""

    @property
    def scores_echo(self) -> bool:
        """Whether the shown prompts have log-probabilities."""
        return self.echo and self.messages is None and self.num_logprobs is not None


def shown_tools(asked: GenerationRequest) -> list[Tool]:
    """Returns the tools that the chat template gets."""
    return [] if asked.tool_choice == "none" else asked.tools


def callable_tools(asked: GenerationRequest) -> list[Tool]:
    """Returns the tools that the answer may call."""
    if isinstance(asked.tool_choice, AllowedTools):
        return [tool for tool in asked.tools if tool.name in asked.tool_choice.names]
    return shown_tools(asked)


def must_call(asked: GenerationRequest) -> bool:
    """Returns whether the answer must call a tool."""
    if isinstance(asked.tool_choice, AllowedTools):
        return asked.tool_choice.must_call
    return asked.tool_choice not in ("auto", "none")
