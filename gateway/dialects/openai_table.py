"""Fields of OpenAI's and vLLM's requests that have no effect here.

Every other field of the schemas has an effect, and a field outside the schemas is refused by name.
`null`, `[]` and `{}` count as absent. `make api` writes these fields into docs/use/api-chat.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from gateway.dialects.constraints import ConstraintFields
from gateway.dialects.history import is_absent
from gateway.exceptions import InvalidRequest

Short = Annotated[str, Meta(max_length=256)]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]

WITHOUT_EFFECT = frozenset(("metadata", "prompt_cache_key", "spaces_between_special_tokens"))
"""Fields that need no action here, or hold only the client's notes. No header names them."""


class Wish(NamedTuple):
    """Mark of a field that is ignored. The answer's header `loraplex-dropped` names the field,
    unless its value is null, [], {} or in `nothing`."""

    nothing: tuple[Any, ...] = ()


class Refusal(NamedTuple):
    """Mark of an unsupported field that would change the answer. The field is refused with the
    `reason`, unless its value is null, [], {} or in `nothing`."""

    reason: str
    nothing: tuple[Any, ...] = ()
    takes_empty: bool = True
    """Whether [] and {} are accepted too."""


M = TypeVar("M")


class FieldsWithoutEffect(ConstraintFields, frozen=True, kw_only=True):
    """Fields without effect that both chats and completions may have."""

    # The fields below have no effect, and no header names them.
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    prompt_cache_key: str | None = None
    spaces_between_special_tokens: bool | None = None

    request_id: Annotated[Short | None, Wish()] = None
    service_tier: Annotated[ServiceTier | None, Wish(("auto", "default"))] = None
    store: Annotated[bool | None, Wish((False,))] = None

    early_stopping: Annotated[Any, Refusal("There is no beam search.", (False,))] = None
    guided_decoding_backend: Annotated[Any, Refusal("There is one, llguidance.")] = None
    guided_whitespace_pattern: Annotated[Any, Refusal("White space is bounded by the server.")] = (
        None
    )
    kv_transfer_params: Annotated[
        Any, Refusal("Prompts and answers are computed by one worker.")
    ] = None
    length_penalty: Annotated[Any, Refusal("There is no beam search.", (1,))] = None
    logits_processors: Annotated[Any, Refusal("Code of a request is not run.")] = None
    use_beam_search: Annotated[Any, Refusal("There is none; use `n`.", (False,))] = None
    vllm_xargs: Annotated[Any, Refusal("There are no plug-ins to take them.")] = None

    def __post_init__(self) -> None:
        for name, refusal in marked(type(self), Refusal).items():
            if getattr(self, name) is not None:
                check_refused(name, getattr(self, name), *refusal)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Names of the ignored fields that the request has set."""
        found: list[str] = []
        for name, wish in sorted(marked(type(self), Wish).items()):
            value = getattr(self, name)
            if not is_absent(value) and value not in wish.nothing:
                found.append(name)
        return tuple(found)


@cache
def marked(request: type[FieldsWithoutEffect], mark: type[M]) -> Mapping[str, M]:
    """Returns the marks of this type in a request's schema, by field name."""
    hints = get_type_hints(request, include_extras=True)
    return {
        name: found
        for name, hint in hints.items()
        for found in getattr(hint, "__metadata__", ())
        if isinstance(found, mark)
    }


def check_refused(
    name: str, value: Any, reason: str, nothing: Sequence[Any], takes_empty: bool = True
) -> None:
    """Raises InvalidRequest, with the `reason`, unless the value is absent or in `nothing`."""
    if value is None or value in nothing or (takes_empty and is_absent(value)):
        return
    choices = " or ".join(msgspec.json.encode(each).decode() for each in (*nothing, None))
    raise InvalidRequest(
        f"Unsupported parameter: '{name}' may only be {choices}. {reason}".replace("`", "'"),
        param=name,
        code="unsupported_parameter",
    )
