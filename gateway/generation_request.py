"""Defines the request for a model into which the request of every API dialect is translated."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gateway.conversation import AllowedTools, Conversation, Message, Tool, ToolChoice
from gateway.relevance import Pair
from workers.wire.protocol import OutputKind


class Constraint(msgspec.Struct, frozen=True):
    """Constraint on the answer's text that is enforced during generation."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    """Schema as JSON, regular expression, or grammar in llguidance's Lark syntax."""
    param: str
    """Name of the body field that sets the constraint. Error messages name it."""
    strict: bool = False
    """Whether a JSON Schema with a keyword that cannot be enforced is refused. Otherwise the
    keyword is dropped."""


class Truncation(msgspec.Struct, frozen=True):
    """Truncation of a long prompt."""

    max_tokens: int
    """Maximum number of tokens kept, including the tokenizer's special tokens. -1 keeps as many
    tokens as the context has room for."""
    side: Literal["left", "right"]
    """Side at which tokens are removed. For a pair, tokens are removed from the document."""
    param: str = "truncate_prompt_tokens"
    """Name of the body field that sets the truncation. Error messages name it."""


class ThoughtBudget(msgspec.Struct, frozen=True):
    """Maximum number of tokens of the thought before an answer."""

    max_tokens: int
    param: str
    """Name of the body field that sets the budget. Error messages name it."""
    is_wish: bool = False
    """Whether a budget that cannot be enforced for the model is dropped and reported in the header
    `loraplex-dropped`. Otherwise such a request is refused."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Checked request for generated text or vectors. A generation parameter that is None takes the
    default of the adapter, the base model or the gateway. Either `messages` is set, or `prompts`
    has one entry for each prompt, as text or token ids, or `pairs` is set."""

    model: str
    messages: list[Message] | None = None
    prompts: list[str | list[int]] = []
    kind: OutputKind = OutputKind.GENERATE
    """Kind of output. `generate` returns text and, with `echo`, scores of the prompts. `embed`
    returns a vector for each prompt, and needs `max_tokens` 0."""
    pairs: list[Pair] = []
    """Pairs of a query and a document, instead of prompts for kind `embed`. The chat template
    renders each pair as a question, and its vector has the logits of the answers "no" and "yes"."""
    dimensions: int | None = None
    """Number of leading dimensions that are kept of each vector, for kind `embed`. None keeps
    all."""
    dimensions_param: str = "dimensions"
    """Name of the body field that sets `dimensions`. Error messages name it."""
    prompts_param: str = "prompt"
    """Name of the body field that contains the prompts. Error messages name it."""
    echo: bool = False
    """Whether each prompt is shown before its answer, and scored if log-probabilities are
    requested. With `messages`, whether the content that the answer continues is shown."""
    num_prompt_logprobs: int | None = None
    """Number of most likely tokens that are returned with each prompt token, apart from the answer.
    None returns no prompt tokens."""
    truncation: Truncation | None = None
    """Truncation of long prompts. None refuses them."""
    max_document_tokens: int | None = None
    """Maximum number of tokens kept from the beginning of the document of each pair. None keeps
    all."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to prompts. None adds them to texts, but not to
    the output of a chat template."""
    stream: bool = False
    num_choices: int = 1
    """Number of answers to each prompt."""
    max_tokens: int | None = None
    """Maximum number of generated tokens. It is cut to the room that the prompt leaves in the
    context."""
    max_tokens_param: str = "max_tokens"
    """Name of the body field that sets `max_tokens`. Error messages name it."""
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
    """Ids of the only tokens that may be generated. Empty allows all."""
    bad_words: list[str] = []
    thought_budget: ThoughtBudget | None = None
    seed: int | None = None
    num_logprobs: int | None = None
    """Number of most likely tokens that are shown with each token. 0 shows only the token's own
    log-probability, `ALL_TOKENS` shows the whole vocabulary, and None shows no
    log-probabilities."""
    logprob_token_ids: tuple[int, ...] = ()
    """Ids of the tokens that are shown with each token instead of the most likely ones, if
    `num_logprobs` is set."""
    scores_texts: bool = False
    """Whether each piece of the answer's text is returned with the log-probabilities of its tokens.
    The end of a stream repeats them."""
    priority: int = 0
    cache_salt: str = ""
    tools: list[Tool] = []
    tool_choice: ToolChoice = "auto"
    """Choice whether the answer may, must not or must call one of the `tools`."""
    is_parallel: bool = True
    """Whether an answer may have several tool calls."""
    constraint: Constraint | None = None
    add_generation_prompt: bool = True
    """Whether the prompt of `messages` ends with the beginning of an answer."""
    continue_final_message: bool = False
    """Whether the answer continues the content of the last of the `messages`."""
    template_arguments: dict[str, Any] = {}
    """Additional variables for the chat template."""
    skip_special_tokens: bool = True
    """Whether the text omits special tokens."""
    shows_stop: bool = False
    """Whether the text includes the stop string that ended the answer."""
    user: str | None = None
    """Id of the caller's end user, by which a canary splits requests. None splits by API key."""
    dropped: tuple[str, ...] = ()
    """Names of fields without effect. The answer's header `loraplex-dropped` lists them."""

    @property
    def scores_echo(self) -> bool:
        """Whether the prompts that are shown before answers have log-probabilities."""
        return self.echo and self.messages is None and self.num_logprobs is not None


def shown_tools(asked: GenerationRequest) -> list[Tool]:
    """Returns the tools that are passed to the chat template."""
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


def conversation_of(asked: GenerationRequest, messages: list[Message]) -> Conversation:
    """Returns the conversation of a request. It has no tools if the request's `tool_choice` is
    `none`."""
    return Conversation(
        messages,
        shown_tools(asked),
        asked.add_generation_prompt,
        asked.continue_final_message,
        asked.template_arguments,
    )
