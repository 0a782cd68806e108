"""What becomes of the fields of OpenAI's and vLLM's requests that have no effect here.

Every other field of the schemas has its effect, and one that is in no schema is refused by name.
`null` counts as absent everywhere. docs/use/api.md is made from these
tables (`make api`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

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

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "store": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""What would change the answer and is not supported, with the values that ask for nothing."""


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
    allowed_token_ids: Any = None
    bad_words: Any = None
    best_of: Any = None
    early_stopping: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    prompt_logprobs: Any = None
    return_tokens_as_token_ids: Any = None
    store: bool | None = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None

    also_refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """What this route alone refuses, as REFUSED has it."""

    def __post_init__(self) -> None:
        for name, allowed in refused_of(type(self)).items():
            if getattr(self, name) is not None:
                check_refused(name, getattr(self, name), allowed)

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
def refused_of(request: type[FieldsWithoutEffect]) -> Mapping[str, tuple[Any, ...]]:
    """The fields of a schema that are refused, with the values that ask for nothing."""
    refused = {**REFUSED, **request.also_refused}
    return {name: refused[name] for name in request.__struct_fields__ if name in refused}


def check_refused(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raises InvalidRequest unless the value is absent or `allowed`."""
    if value is None or value in allowed:
        return
    choices = " or ".join(msgspec.json.encode(each).decode() for each in (*allowed, None))
    raise InvalidRequest(
        f"Unsupported parameter: '{name}' may only be {choices}.",
        param=name,
        code="unsupported_parameter",
    )
