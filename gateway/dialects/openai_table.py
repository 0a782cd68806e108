"""What becomes of the fields of OpenAI's and vLLM's requests that have no effect here.

Every other field of the schemas has its effect, and one that is in no schema is refused by name.
`null` counts as absent everywhere. docs/use/api.md is made from these
tables (`make api`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta

from gateway.dialects.constraints import ConstraintFields
from gateway.exceptions import InvalidRequest

Short = Annotated[str, Meta(max_length=256)]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]

WITHOUT_EFFECT = frozenset(("metadata", "prompt_cache_key", "spaces_between_special_tokens"))
"""What they ask for needs nothing to be done, or is no more than a note."""

DROPPED: Mapping[str, tuple[Any, ...]] = {
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "request_id": (),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
}
"""Wishes that an answer can do without: named in the answer's header `loraplex-dropped`, except
for the values that ask for nothing."""


class Refusal(NamedTuple):
    """Why a field is refused, and the values of it that ask for nothing."""

    reason: str
    nothing: tuple[Any, ...] = ()


REFUSED: Mapping[str, Refusal] = {
    "audio": Refusal("Answers are text."),
    "chat_template": Refusal("Templates are the model's or the adapter version's."),
    "documents": Refusal("Put them into the messages.", ([],)),
    "early_stopping": Refusal("There is no beam search.", (False,)),
    "function_call": Refusal("Its successor is `tool_choice`.", ("none", "auto")),
    "functions": Refusal("Their successor is `tools`.", ([],)),
    "guided_decoding_backend": Refusal("There is one, llguidance."),
    "guided_whitespace_pattern": Refusal("White space is bounded by the server."),
    "kv_transfer_params": Refusal("Prompts and answers are computed by one worker."),
    "length_penalty": Refusal("There is no beam search.", (1,)),
    "logits_processors": Refusal("Code of a request is not run.", ([],)),
    "mm_processor_kwargs": Refusal("Prompts are text.", ({},)),
    "modalities": Refusal("Answers are text.", (["text"],)),
    "moderation": Refusal("Nothing is moderated."),
    "prompt_embeds": Refusal("Prompts are text or token ids."),
    "return_tokens_as_token_ids": Refusal("Use `return_token_ids`.", (False,)),
    "store": Refusal("No answer is stored.", (False,)),
    "suffix": Refusal("Text is continued, not filled in.", ("",)),
    "use_beam_search": Refusal("There is none; use `n`.", (False,)),
    "vllm_xargs": Refusal("There are no plug-ins to take them.", ({},)),
    "web_search_options": Refusal("Nothing is searched."),
}
"""What would change the answer and is not supported."""


class FieldsWithoutEffect(ConstraintFields, frozen=True, kw_only=True):
    """Those that chats and completions may both have."""

    # accepted without effect
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    prompt_cache_key: str | None = None
    spaces_between_special_tokens: bool | None = None

    # dropped
    request_id: Short | None = None
    service_tier: ServiceTier | None = None

    # refused
    early_stopping: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    return_tokens_as_token_ids: Any = None
    store: bool | None = None
    use_beam_search: Any = None
    vllm_xargs: Any = None

    also_refused: ClassVar[Mapping[str, Refusal]] = {}
    """What this route alone refuses, as REFUSED has it."""

    def __post_init__(self) -> None:
        for name, refusal in refused_of(type(self)).items():
            if getattr(self, name) is not None:
                check_refused(name, getattr(self, name), *refusal)

    @property
    def dropped(self) -> tuple[str, ...]:
        """The fields that were given and are dropped."""
        found: list[str] = []
        for name, nothing in DROPPED.items():
            value = getattr(self, name, None)
            if value is not None and value not in nothing:
                found.append(name)
        return tuple(found)


@cache
def refused_of(request: type[FieldsWithoutEffect]) -> Mapping[str, Refusal]:
    """The fields of a schema that are refused."""
    refused = {**REFUSED, **request.also_refused}
    return {name: refused[name] for name in request.__struct_fields__ if name in refused}


def check_refused(name: str, value: Any, reason: str, nothing: Sequence[Any]) -> None:
    """Raises InvalidRequest, with the `reason`, unless the value is absent or asks for nothing."""
    if value is None or value in nothing:
        return
    choices = " or ".join(msgspec.json.encode(each).decode() for each in (*nothing, None))
    raise InvalidRequest(
        f"Unsupported parameter: '{name}' may only be {choices}. {reason}".replace("`", "'"),
        param=name,
        code="unsupported_parameter",
    )
