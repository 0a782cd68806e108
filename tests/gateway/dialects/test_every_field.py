"""Every field that the official clients' types have, at every depth, is used, refused by name, or
named in `loraplex-dropped`, unless it is listed here as accepted without effect."""

from __future__ import annotations

import collections.abc
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
import pytest
from anthropic.types import MessageCountTokensParams
from anthropic.types.beta.message_create_params import (
    MessageCreateParamsBase as BetaMessageParams,
)
from anthropic.types.message_create_params import MessageCreateParamsBase as MessageParams
from msgspec import inspect
from openai.types import EmbeddingCreateParams
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from typing_extensions import is_typeddict

from gateway.dialects.chat_completions import ChatCompletionRequest, ChatCompletions
from gateway.dialects.cohere_embeddings import CohereEmbeddings, EmbedRequest
from gateway.dialects.completions import CompletionRequest, Completions
from gateway.dialects.dialect import AnswerContext
from gateway.dialects.embeddings import EmbeddingRequest, Embeddings
from gateway.dialects.messages import Messages
from gateway.dialects.messages_fields import CountTokensRequest, MessagesRequest
from gateway.dialects.relevance_scores import Reranking, RerankRequest, ScoreRequest, Scores
from gateway.dialects.responses import Responses
from gateway.dialects.responses_fields import ResponsesRequest
from gateway.exceptions import InvalidRequest
from gateway.http.request import decode_request
from web.decoding import decoder_of
from workers.wire.protocol import SamplingParams

MAX_DEPTH = 7
"""Maximum number of objects on one path from the body to a field."""
MAX_SAMPLES = 8
NUMBERS = itertools.count()
"""Every text is another one."""


class Route(NamedTuple):
    params: Any
    schema: Any
    dialect: Any
    needed: dict[str, Any]


HI = [{"role": "user", "content": "Hi"}]
ROUTES: dict[str, Route] = {
    "chat": Route(ChatParams, ChatCompletionRequest, ChatCompletions(), {"messages": HI}),
    "text": Route(TextParams, CompletionRequest, Completions(), {"prompt": "Hi"}),
    "responses": Route(ResponseCreateParamsBase, ResponsesRequest, Responses(), {"input": "Hi"}),
    "messages": Route(
        MessageParams, MessagesRequest, Messages(), {"messages": HI, "max_tokens": 9}
    ),
    "beta": Route(
        BetaMessageParams, MessagesRequest, Messages(), {"messages": HI, "max_tokens": 9}
    ),
    "count": Route(MessageCountTokensParams, CountTokensRequest, Messages(), {"messages": HI}),
    "embeddings": Route(EmbeddingCreateParams, EmbeddingRequest, Embeddings(), {"input": "Hi"}),
    "embed": Route(None, EmbedRequest, CohereEmbeddings(), {"texts": ["Hi"]}),
    "score": Route(None, ScoreRequest, Scores(), {"queries": "Hi", "documents": ["Ho"]}),
    "rerank": Route(None, RerankRequest, Reranking(), {"query": "Hi", "documents": ["Ho"]}),
}


NEEDED = {"truncation_side": {"truncate_prompt_tokens": 3}}
"""Fields without which a field has nothing to decide."""


def bare(hint: Any) -> Any:
    """The type without marks such as Required."""
    while str(get_origin(hint)).endswith(("Required", "Annotated")):
        hint = get_args(hint)[0]
    return hint


def members(hint: Any) -> list[Any]:
    hint = bare(hint)
    origin = get_origin(hint)
    if origin is not None and "Union" in str(origin):
        return [each for arg in get_args(hint) for each in members(arg)]
    return [] if hint is type(None) else [hint]


def samples(hint: Any, depth: int = 0) -> list[Any]:
    found: list[Any] = []
    for each in members(hint):
        origin, args = get_origin(each), get_args(each)
        if origin is Literal:
            found += args
        elif is_typeddict(each):
            found.append(smallest(each, depth + 1))
        elif origin in (list, collections.abc.Iterable, collections.abc.Sequence):
            found += [[value] for value in samples(args[0], depth + 1)[:MAX_SAMPLES]]
        elif origin in (dict, collections.abc.Mapping):
            values = samples(args[1], depth + 1)
            found.append({"7": values[0] if values else "x"})
        else:
            texts = [f"x{next(NUMBERS)}"] if each is str else [{"x": 1}]
            found += {bool: [True, False], int: [1, 2], float: [0.5]}.get(each, texts)
    return found


def minimal(kind: Any, depth: int = 0) -> dict[str, Any]:
    """The object with only its required fields."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: samples(hint, depth)[0] for name, hint in hints.items() if is_required(kind, hint)
    }


def smallest(kind: Any, depth: int = 0) -> dict[str, Any]:
    """The object with only its required fields, or with one field if none is required."""
    if (found := minimal(kind, depth)) or depth > 4:
        return found
    name, hint = next(iter(get_type_hints(kind).items()))
    return {name: samples(hint, depth)[0]}


def is_required(kind: Any, hint: Any) -> bool:
    mark = str(get_origin(hint)).rpartition(".")[2]
    return mark == "Required" or (kind.__total__ and mark != "NotRequired")


class Case(NamedTuple):
    path: tuple[str, ...]
    without: dict[str, Any]
    bodies: list[dict[str, Any]]


def cases(
    hint: Any, wrap: Callable[[Any], Any], path: tuple[str, ...], within: tuple[Any, ...] = ()
) -> Iterator[Case]:
    for each in members(hint):
        origin, args = get_origin(each), get_args(each)
        if origin in (list, collections.abc.Iterable, collections.abc.Sequence):
            first = HI if path in (("messages",), ("input",)) else []
            yield from cases(
                args[0], lambda value, first=first: wrap([*first, value]), path, within
            )
        elif is_typeddict(each) and each not in within and len(within) < MAX_DEPTH:
            base, hints = minimal(each), get_type_hints(each)
            kind = base.get("type", base.get("role"))
            here = path if kind is None else (*path[:-1], f"{path[-1]}<{kind}>")
            for name, inner in hints.items():

                def holding(value: Any, name: str = name, base: Any = base) -> Any:
                    return wrap({**base, name: value})

                found = [holding(value) for value in samples(inner)]
                without = wrap({key: base[key] for key in base if key != name})
                yield Case((*here, name), without, found)
                yield from cases(inner, holding, (*here, name), (*within, each))


def all_cases(route: Route) -> Iterator[Case]:
    hints = get_type_hints(route.params) if route.params else {}
    base = {"model": "m", **route.needed}
    for name, hint in hints.items():
        without = {key: value for key, value in base.items() if key != name}
        yield Case((name,), without, [{**base, name: value} for value in samples(hint)])
        yield from cases(hint, lambda value, name=name: {**base, name: value}, (name,))


class Outcome(NamedTuple):
    read: Any = None
    dropped: frozenset[str] = frozenset()
    refusal: str = ""


def outcome(route: Route, body: Any) -> Outcome:
    try:
        decoded = decode_request(decoder_of(route.schema), msgspec.json.encode(body))
        count = route.schema is CountTokensRequest
        request = route.dialect.count(decoded) if count else route.dialect.read(decoded)
    except InvalidRequest as error:
        return Outcome(refusal=f"{error.param} {error}")
    context = AnswerContext("r", [b"x"] * 300, SamplingParams(5, 1))  # pyright: ignore
    shown = None if count else vars(route.dialect.answer_format(decoded, context))
    shown = {key: value for key, value in (shown or {}).items() if key != "_created"}
    shown.get("_echoed", {}).pop("created_at", None)
    dropped = frozenset(request.dropped)
    return Outcome((msgspec.structs.replace(request, dropped=()), repr(shown)), dropped)


def fate(route: Route, case: Case) -> str:
    """Returns what becomes of the field in at least one of its values."""
    before = outcome(route, case.without)
    top, *words = re.findall(r"[a-z_0-9]+", " ".join(case.path))
    words = [re.sub("^(input|output)_", "", word) for word in (words or [top])]
    refusals: set[str] = set()
    for body in case.bodies:
        after = outcome(route, body)
        if after.refusal:
            refusals.add(after.refusal)
            told = re.findall("[a-z_0-9]+", after.refusal.partition(" ")[2])
            told = [re.sub("^(input|output)_", "", word) for word in told]
            if not {*words}.isdisjoint(told) or f"Unsupported parameter: '{top}'" in after.refusal:
                return "refused"
        elif after.dropped - before.dropped:
            return "dropped"
        elif after.read != before.read:
            return "used"
        elif any(word in name.split(".") for name in after.dropped for word in (top, *words)):
            return "dropped"
    return "; ".join(sorted(refusals)) or "no effect"


def own_samples(kind: Any) -> list[Any]:
    """Values of a field of our own schema, by its msgspec type."""
    match kind:
        case inspect.UnionType(types=types):
            return [value for each in types for value in own_samples(each)]
        case inspect.Metadata(type=inner):
            return own_samples(inner)
        case inspect.BoolType():
            return [True, False]
        case inspect.IntType(ge=ge, le=le):
            return [2 if le is None or le >= 2 else le, ge or 0]
        case inspect.FloatType():
            return [0.5, 1.5]
        case inspect.StrType():
            return [f"x{next(NUMBERS)}"]
        case inspect.LiteralType(values=values):
            return list(values)
        case inspect.ListType(item_type=item):
            return [[value] for value in own_samples(item)]
        case inspect.DictType(key_type=key, value_type=value):
            return [{"7" if isinstance(key, inspect.IntType) else "x": own_samples(value)[0]}]
        case inspect.StructType(fields=fields, tag=tag, tag_field=tag_field):
            base = {tag_field: tag} if tag_field else {}
            base |= {
                each.encode_name: own_samples(each.type)[0] for each in fields if each.required
            }
            others = [each for each in fields if not each.required]
            return [
                {**base, each.encode_name: value}
                for each in others
                for value in own_samples(each.type)
            ] or [base]
        case inspect.AnyType():
            return [{"x": 1}]
        case _:
            return []


def own_cases(route: Route) -> Iterator[Case]:
    """Fields that only our schemas have, such as those of vLLM and llama.cpp."""
    known = get_type_hints(route.params) if route.params else {}
    base = {"model": "m", **route.needed}
    kind = inspect.type_info(route.schema)
    assert isinstance(kind, inspect.StructType)
    for each in kind.fields:
        if (name := each.encode_name) not in known:
            within = {**base, **NEEDED.get(name, {})}
            without = {key: value for key, value in within.items() if key != name}
            found = [{**within, name: value} for value in own_samples(each.type)]
            yield Case((name,), without, found)


ANYWHERE = {"annotations", "id", "index", "logprobs", "media_type", "role", "status", "type"}
"""Fields of parts, items and calls that add nothing to a prompt."""
WITHOUT_EFFECT: dict[str, set[str]] = {
    "chat": {"metadata", "prompt_cache_key", "spaces_between_special_tokens"},
    "text": {"metadata", "prompt_cache_key", "spaces_between_special_tokens"},
    "responses": {
        # The text of the reasoning is in `content`; without it, the field is read or named.
        "input<reasoning>.encrypted_content",
        "input<tool_search_output>.execution",
    },
    "messages": {"messages<assistant>.content<thinking>.signature"},
    "beta": {"messages<assistant>.content<thinking>.signature"},
    # What an answer must be does not change the number of tokens in its prompt.
    "count": {
        "messages<assistant>.content<thinking>.signature",
        "output_config.format",
        "thinking<enabled>.budget_tokens",
    },
}
"""Fields that are accepted without effect and not named, by route."""


@pytest.mark.parametrize("name", ROUTES)
def test_every_field_is_used_refused_or_named(name: str) -> None:
    route, num_used, others = ROUTES[name], 0, dict[str, str]()
    for case in itertools.chain(all_cases(route), own_cases(route)):
        found = fate(route, case)
        num_used += found == "used"
        path, within = ".".join(case.path), [re.sub("<.*", "", step) for step in case.path]
        if found in ("used", "dropped", "refused") or path in WITHOUT_EFFECT.get(name, ()):
            continue
        if ANYWHERE.isdisjoint(within[1:]):
            others[path] = found
    assert not others
    assert num_used > 5
