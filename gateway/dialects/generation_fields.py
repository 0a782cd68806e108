"""Defines the request fields of OpenAI's APIs and vLLM that set the sampling, the end of an answer
and its constraint to a schema or grammar."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.exceptions import InvalidRequest
from gateway.limits.bounds import MAX_SCHEMA_BYTES, check_json, check_nested
from gateway.request import Constraint
from gateway.text.grammar_limits import MAX_EXPRESSION_BYTES, check_expression

Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Priority = Annotated[int, Meta(ge=-100, le=100)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
StopString = Annotated[str, Meta(max_length=256)]
MAX_STOPS = 64
StopStrings = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
MAX_BIASES = 300
"""Maximum entries of `logit_bias`. Each entry is copied to the input of every engine step."""
MAX_ALLOWED = 4096
MAX_BAD_WORDS = 256
MAX_CONSTRAINT_CHARS = 256 << 10
"""Maximum characters of a grammar, a schema given as text, or all choices together."""
MAX_CHOICES = 4096
Name = Annotated[str, Meta(max_length=256)]
Strict = bool | Literal["true", "false"]
"""LM Studio's clients send a text."""
Text = Annotated[str, Meta(min_length=1, max_length=MAX_CONSTRAINT_CHARS)]
Expression = Annotated[
    str, Meta(min_length=1, extra_json_schema={"maxLength": MAX_EXPRESSION_BYTES})
]
Schema = dict[str, Any] | bool
Choices = Annotated[
    list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES)
]


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that chats, completions and responses share."""

    stop: StopStrings | None = None
    """Texts that end the answer. Empty texts are dropped."""
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)
        ]
        | None
    ) = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED)] | None = None
    """Ids of the only tokens that are generated. An empty list has no effect."""
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    """Texts that are not generated, with or without a space before them."""
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    skip_special_tokens: bool | None = None
    """If false, the text contains special tokens."""
    include_stop_str_in_output: bool | None = None
    """Whether the text includes the stop string that ended the answer."""

    def sampling(self) -> dict[str, Any]:
        """Returns these fields as a `Request` has them."""
        return {
            "min_tokens": self.min_tokens or 0,
            "stop": stops_of(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": bool(self.ignore_eos),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias or None,
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
            "bad_words": self.bad_words or [],
            "seed": self.seed,
            "priority": self.priority or 0,
            "cache_salt": self.cache_salt or "",
            "skip_special_tokens": self.skip_special_tokens is not False,
            "shows_stop": bool(self.include_stop_str_in_output),
        }

    def check_min_tokens(self, max_tokens: int | None, name: str = "max_tokens") -> None:
        """Raises InvalidRequest if `min_tokens` exceeds `max_tokens`. `name` is the name of the
        field of the request that set `max_tokens`."""
        if max_tokens is not None and (self.min_tokens or 0) > max_tokens:
            raise InvalidRequest(
                f"'min_tokens' is {self.min_tokens}, and '{name}' only {max_tokens}.",
                param="min_tokens",
            )


def stops_of(stop: str | list[str] | None) -> list[str]:
    """Returns the stop strings that are not empty."""
    return [each for each in ([stop] if isinstance(stop, str) else stop or ()) if each]


def has_empty(stop: str | list[str] | None) -> bool:
    """Returns whether one of the stop strings is empty."""
    return stop == "" or (isinstance(stop, list) and "" in stop)


class TextFormat(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, frozen=True, tag="json_object", forbid_unknown_fields=True):
    """JSON object, of any structure unless a schema is given."""

    schema: Schema | None = None


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """JSON Schema in OpenAI's form, to which the answer is constrained. If a keyword cannot be
    enforced, `strict` refuses the request. Otherwise the keyword is dropped."""

    schema: Schema
    name: Name | None = None
    """Accepted without effect."""
    description: str | None = None
    """Accepted without effect."""
    strict: Strict | None = None


class JsonSchemaFormat(
    msgspec.Struct, frozen=True, tag="json_schema", kw_only=True, forbid_unknown_fields=True
):
    """JSON that conforms to a schema. The schema is in `json_schema`, or next to `type`."""

    json_schema: NamedSchema | None = None
    schema: Schema | None = None
    name: Name | None = None
    description: str | None = None
    strict: Strict | None = None

    def __post_init__(self) -> None:
        if (self.json_schema is None) == (self.schema is None):
            raise InvalidRequest(
                "'response_format' needs a schema, in 'json_schema.schema' or in 'schema'.",
                param="response_format",
            )

    @property
    def named(self) -> NamedSchema:
        """The schema, whatever its place. `strict` may be next to `json_schema` too."""
        if self.json_schema is None:
            assert self.schema is not None
            return NamedSchema(schema=self.schema, strict=self.strict)
        if self.strict is None or self.json_schema.strict is not None:
            return self.json_schema
        return msgspec.structs.replace(self.json_schema, strict=self.strict)


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`, of which one field may constrain the answer."""

    json: Schema | Text | None = None
    regex: Expression | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    disable_additional_properties: bool | None = None
    """Whether objects have only the properties that the schema declares, unless the schema has a
    keyword about other properties. Default: true for `response_format`, false for `guided_json` and
    `json`."""


class ConstraintFields(SamplingFields, frozen=True, kw_only=True):
    """Request fields that constrain an answer. At most one may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | Text | None = None
    guided_regex: Expression | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    def constraint(self) -> Constraint | None:
        """Returns the answer's constraint, or None if no field sets one. Raises InvalidRequest if
        several fields set one, or if one is invalid."""
        given = self.structured_outputs or StructuredOutputs()
        fields = (
            _of_format(self.response_format),
            _of_schema("guided_json", self.guided_json),
            _of_expression("guided_regex", self.guided_regex),
            _of_choices("guided_choice", self.guided_choice),
            _of_lark("guided_grammar", self.guided_grammar),
            _of_schema("structured_outputs", given.json),
            _of_expression("structured_outputs", given.regex),
            _of_choices("structured_outputs", given.choice),
            _of_lark("structured_outputs", given.grammar),
            any_object("structured_outputs") if given.json_object else None,
        )
        found = [constraint for constraint in fields if constraint is not None]
        if (closes := given.disable_additional_properties) is not None:
            found = [msgspec.structs.replace(each, is_closed=closes) for each in found]
        if len(found) > 1:
            names = ", ".join(f"'{param}'" for param in dict.fromkeys(c.param for c in found))
            raise InvalidRequest(
                f"An answer is held to one schema or grammar; {len(found)} are given ({names}).",
                param=found[1].param,
            )
        return found[0] if found else None


def any_object(param: str) -> Constraint:
    """Returns a constraint that allows any JSON object."""
    return Constraint("json_schema", '{"type":"object"}', param)


def object_constraint(param: str, format: JsonObjectFormat) -> Constraint:
    """Returns a constraint to the format's schema, or to any JSON object if the format has no
    schema. Raises InvalidRequest if the schema is too large or nested too deeply."""
    if format.schema is None:
        return any_object(param)
    return schema_constraint(param, format.schema)


def schema_constraint(
    param: str, schema: Schema, *, strict: Strict | None = None, is_closed: bool = True
) -> Constraint:
    """Returns a constraint to a JSON Schema, whose objects are closed by default. Raises
    InvalidRequest if the schema is too large or nested too deeply."""
    text = check_nested(schema, MAX_SCHEMA_BYTES, param=param)
    return Constraint("json_schema", text, param, strict in (True, "true"), is_closed)


def _of_format(format: ResponseFormat | None) -> Constraint | None:
    match format:
        case JsonObjectFormat():
            return object_constraint("response_format", format)
        case JsonSchemaFormat(named=named):
            return schema_constraint("response_format", named.schema, strict=named.strict)
        case _:
            return None


def _of_schema(param: str, given: Schema | str | None) -> Constraint | None:
    if given is None:
        return None
    if not isinstance(given, str):
        return schema_constraint(param, given, is_closed=False)
    check_json(given.encode(), MAX_SCHEMA_BYTES, param=param)
    try:
        msgspec.json.decode(given, type=dict[str, msgspec.Raw] | bool)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"'{param}' is not a JSON Schema: {error}", param=param) from None
    return Constraint("json_schema", given, param)


def _of_expression(param: str, given: str | None) -> Constraint | None:
    if given is None:
        return None
    check_expression(given, param=param)
    return Constraint("regex", given, param)


def _of_lark(param: str, given: str | None) -> Constraint | None:
    return None if given is None else Constraint("lark", given, param)


def _of_choices(param: str, given: list[str] | None) -> Constraint | None:
    """Returns a grammar that allows only these texts, or None if `given` is None. Raises
    InvalidRequest if the texts have too many characters."""
    if given is None:
        return None
    if sum(map(len, given)) > MAX_CONSTRAINT_CHARS:
        raise InvalidRequest(f"'{param}' has too many characters.", param=param)
    choices = " | ".join(msgspec.json.encode(choice).decode() for choice in given)
    return Constraint("lark", f"start: {choices}", param)
