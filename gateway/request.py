"""Defines the neutral request, into which every API dialect translates its requests. It has a
conversation, prompts or pairs to be judged, and the parameters of generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from workers.wire.protocol import OutputKind

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
VERDICTS = ("no", "yes")
"""Answers to the question whether a document is relevant. A pair's vector has the logits of these
answers, in this order."""


class MadeCall(msgspec.Struct, frozen=True):
    """Tool call in an earlier answer."""

    id: str
    name: str
    arguments: dict[str, Any]

    def for_template(self) -> dict[str, Any]:
        """Returns the call in the form that chat templates expect. Its arguments are an object, not
        JSON text."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(msgspec.Struct, frozen=True):
    """Turn of a conversation. Only a turn of the assistant has `reasoning` and `calls`, and only a
    turn of a tool has a `call_id`."""

    role: str
    """`system`, `user`, `assistant`, `tool`, or another role that the chat template names."""
    content: str = ""
    name: str | None = None
    """Name of the speaker, or of the tool."""
    reasoning: str = ""
    """Reasoning that the model wrote before `content`."""
    calls: list[MadeCall] = []
    call_id: str | None = None
    """Id of the call whose result this message is."""

    @property
    def num_chars(self) -> int:
        return len(self.content)

    def for_template(self) -> dict[str, Any]:
        """Returns the message in the form that chat templates expect, without absent fields."""
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            shown["name"] = self.name
        if self.reasoning:
            shown["reasoning_content"] = self.reasoning
        if self.calls:
            shown["tool_calls"] = [call.for_template() for call in self.calls]
        if self.call_id is not None:
            shown["tool_call_id"] = self.call_id
        return shown


def in_turns(
    messages: Iterable[Message], goes_on: Callable[[Message, Message], bool]
) -> list[Message]:
    """Joins each message to the previous one if `goes_on(previous, message)` returns true, which
    means that both belong to one turn. Returns the turns."""
    turns: list[list[Message]] = []
    for message in messages:
        if turns and goes_on(turns[-1][-1], message):
            turns[-1].append(message)
        else:
            turns.append([message])
    return [_joined(turn) for turn in turns]


def _joined(turns: Sequence[Message]) -> Message:
    """Joins consecutive messages of one role."""
    if len(turns) == 1:
        return turns[0]
    return Message(
        turns[0].role,
        "\n".join([turn.content for turn in turns if turn.content]),
        reasoning="\n".join([turn.reasoning for turn in turns if turn.reasoning]),
        calls=[call for turn in turns for call in turn.calls],
    )


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """Function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON Schema of the arguments. The arguments are an object."""
    strict: bool = False
    """Whether arguments are constrained to the schema during generation."""

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect."""
        described = {"description": self.description} if self.description else {}
        function = {"name": self.name, **described, "parameters": self.parameters}
        return {"type": "function", "function": function}


class NamedTool(msgspec.Struct, frozen=True):
    """Choice of tools that requires a call of the tool `name`."""

    name: str


class AllowedTools(msgspec.Struct, frozen=True):
    """Choice of tools that shows all tools to the model, but allows calls of only some of them."""

    names: tuple[str, ...]
    must_call: bool
    """Whether the answer must call one of the tools `names`."""


ToolChoice = Literal["auto", "none", "required"] | NamedTool | AllowedTools


class Conversation(msgspec.Struct, frozen=True):
    messages: list[Message]
    tools: list[Tool] = []
    add_generation_prompt: bool = True
    """Whether the rendered prompt ends with the beginning of an answer."""
    continue_final_message: bool = False
    """Whether the rendered prompt ends with the last message, so that the model continues it."""
    template_arguments: dict[str, Any] = {}
    """Additional variables for the template."""

    @property
    def uses_tools(self) -> bool:
        """Whether the conversation has tools, calls or results."""
        return bool(self.tools) or any(each.calls or each.role == "tool" for each in self.messages)

    @property
    def num_chars(self) -> int:
        """Number of characters that a chat template may render. Calls, tools and template arguments
        count by the length of their JSON."""
        total = 0
        for message in self.messages:
            total += message.num_chars + len(message.name or "") + len(message.reasoning)
            if message.calls:
                total += _size(message.calls)
        if self.tools or self.template_arguments:
            total += _size(self.tools) + _size(self.template_arguments)
        return total


class Pair(msgspec.Struct, frozen=True):
    """Query, and a document whose relevance to the query is judged."""

    query: str
    document: str
    instruction: str = INSTRUCTION
    """Text that tells the model which documents are relevant."""

    @property
    def num_chars(self) -> int:
        """Number of characters of query, document and instruction."""
        return len(self.query) + len(self.document) + len(self.instruction)

    def with_document(self, document: str) -> Pair:
        """Returns the pair with a shortened document. Removes replacement characters from the
        document's ends, because shortening may have cut a character in two."""
        return msgspec.structs.replace(self, document=document.strip("\ufffd"))

    def messages(self) -> list[Message]:
        """Returns a conversation that asks whether the document fits the query. The document is
        last, so that the prompts of all documents of a query share a prefix."""
        question = (
            f"<Instruct>: {self.instruction}\n<Query>: {self.query}\n<Document>: {self.document}"
        )
        return [Message("system", JUDGE), Message("user", question)]


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
    is_closed: bool = False
    """Whether objects have only the properties that a JSON Schema declares, unless it has a keyword
    about other properties."""


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
    dropped_as: str = ""
    """Name by which the header `loraplex-dropped` reports a budget that cannot be enforced for the
    model. Empty if such a request is refused."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Checked request for generated text or vectors. A generation parameter that is None takes the
    default of the adapter, the base model or the gateway. Exactly one of `messages`, `prompts` and
    `pairs` is set. Each of the `prompts` is a text or a list of token ids."""

    model: str
    messages: list[Message] | None = None
    prompts: list[str | list[int]] = []
    kind: OutputKind = OutputKind.GENERATE
    """Kind of output. `generate` returns text and, with `echo`, scores of the prompts. `embed`
    returns a vector for each prompt, and needs `max_tokens` 0."""
    pairs: list[Pair] = []
    """Pairs of a query and a document, instead of prompts for kind `embed`. The chat template
    renders each pair as a question. The pair's vector has the logits of "no" and "yes"."""
    dimensions: int | None = None
    """Number of leading dimensions kept of each vector, for kind `embed`. None keeps all."""
    dimensions_param: str = "dimensions"
    """Name of the body field that sets `dimensions`. Error messages name it."""
    num_vector_forms: int = 1
    """Number of forms in which the answer has each vector."""
    prompts_param: str = "prompt"
    """Name of the body field that contains the prompts. Error messages name it."""
    echo: bool = False
    """Whether each prompt is shown before its answer, with log-probabilities if these are
    requested. With `messages`, whether the content that the answer continues is shown."""
    num_prompt_logprobs: int | None = None
    """Number of most likely tokens that are returned with each prompt token, separately from the
    answer. None returns no prompt tokens."""
    truncation: Truncation | None = None
    """Truncation of long prompts. If None, long prompts are refused."""
    max_document_tokens: int | None = None
    """Maximum number of tokens kept from the beginning of each document. None keeps all."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to prompts. None adds them to texts, but not to
    the output of a chat template."""
    stream: bool = False
    num_choices: int = 1
    """Number of answers to each prompt."""
    max_tokens: int | None = None
    """Maximum number of generated tokens. It is reduced to the room that the prompt leaves in the
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
    returns_token_ids: bool = False
    """Whether the answer has the ids of the prompts' tokens and of the generated tokens."""
    scores_texts: bool = False
    """Whether each piece of the answer's text is returned with the log-probabilities of its tokens.
    A stream repeats the log-probabilities at its end."""
    priority: int = 0
    cache_salt: str = ""
    tools: list[Tool] = []
    tool_choice: ToolChoice = "auto"
    """Whether the answer may, must or must not call one of the `tools`."""
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
    """Id of the end user, by which a canary splits requests. If None, the API key's id is used."""
    dropped: tuple[str, ...] = ()
    """Names of fields without effect. The answer's header `loraplex-dropped` lists them."""

    @property
    def scores_echo(self) -> bool:
        """Whether the prompts that are shown before answers have log-probabilities."""
        return self.echo and self.messages is None and self.num_logprobs is not None

    @property
    def shown_tools(self) -> list[Tool]:
        """Tools that are passed to the chat template."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def callable_tools(self) -> list[Tool]:
        """Tools that the answer may call."""
        if isinstance(self.tool_choice, AllowedTools):
            return [tool for tool in self.tools if tool.name in self.tool_choice.names]
        return self.shown_tools

    @property
    def must_call(self) -> bool:
        """Whether the answer must call a tool."""
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.must_call
        return self.tool_choice not in ("auto", "none")

    @property
    def conversation(self) -> Conversation:
        """Input of the chat template, made of `messages`."""
        return Conversation(
            self.messages or [],
            self.shown_tools,
            self.add_generation_prompt,
            self.continue_final_message,
            self.template_arguments,
        )

    def with_dropped(self, *names: str) -> Request:
        """Returns the request with these names added to its fields without effect."""
        if not names:
            return self
        return msgspec.structs.replace(self, dropped=tuple(sorted((*self.dropped, *names))))


def _size(value: Any) -> int:
    return len(msgspec.json.encode(value))
