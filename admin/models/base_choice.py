"""Chooses an adapter's base model if its tensors fit several or its configuration names one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from adapters.errors import AdapterRejected
from adapters.format.validator import MAX_CONFIG_BYTES
from store.records import BaseModel

AMBIGUOUS, MISMATCH = "adapter.base.ambiguous", "adapter.base.mismatch"
FIELD = "base_model_name_or_path"
MAX_NAME_CHARS = 1024
_CACHED = re.compile(r"models--[^/]+?--([^/]+)")
"""Matches the folder of a repository in Hugging Face's cache."""
_QUANTISED = re.compile(
    r"[-_.](unsloth[-_.])?(bnb|[48]-?bit|int[48]|nf4|fp[48]|gptq|awq|hqq|aqlm|eetq|w\d+a\d+|gguf)"
    r"([-_.].*)?$",
    re.IGNORECASE,
)
"""Matches the ending of a quantised model's name."""


class _Configuration(msgspec.Struct):
    base_model_name_or_path: Any = None


def read_trained_on(config: Path) -> str:
    """Returns the name or path of the model on which an adapter was trained, from its
    configuration. Returns an empty text if the configuration has none or is not JSON. Validation
    refuses a configuration that is not JSON."""
    with config.open("rb") as file:
        raw = file.read(MAX_CONFIG_BYTES)
    try:
        name = msgspec.json.decode(raw, type=_Configuration).base_model_name_or_path
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ""
    return name if isinstance(name, str) and len(name) <= MAX_NAME_CHARS else ""


def choose_base(
    trained_on: str, bases: Sequence[BaseModel], fitting: Sequence[BaseModel]
) -> BaseModel:
    """Returns the base model of an adapter.

    `bases` are the models that the adapter may be for. `fitting` are the models among `bases` that
    accept the adapter's tensors. Raises AdapterRejected if several models remain, or if the
    configuration names models and none of them is in `fitting`.
    """
    named = _find_named(trained_on, bases)
    chosen = [base for base in fitting if base in named] if named else list(fitting)
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        raise AdapterRejected(
            MISMATCH,
            FIELD,
            trained_on,
            [base.name for base in named],
            f"The configuration names {_listed(named)}, which does not take these tensors; they fit"
            f" {_listed(fitting)}. If that is meant, say so: --model {fitting[0].name} (the field"
            " model).",
        )
    names = [base.name for base in chosen]
    raise AdapterRejected(
        AMBIGUOUS,
        FIELD,
        trained_on,
        names,
        f"Several registered base models take these tensors: {_listed(chosen)}. Say which is meant:"
        f" --model {names[0]} (the field model).",
    )


def quantisation_warning(trained_on: str, base: BaseModel) -> str | None:
    """Returns a warning if the adapter was trained on a quantised model and the base model was not
    imported from that model."""
    if not _QUANTISED.search(_last_part(trained_on)) or trained_on_is(trained_on, base):
        return None
    return (
        f"trained on {trained_on}, a quantised model, and served on {base.name}, which was not"
        " imported from it: answers may differ a little from those in training"
    )


def trained_on_is(trained_on: str, base: BaseModel) -> bool:
    """Returns whether a name or path means this base model: its served name or its source."""
    return _last_part(trained_on) in (_last_part(base.name), _last_part(base.source))


def source_of(path: Path) -> str:
    """Returns the name of a model from its path. In Hugging Face's cache this is the repository's
    name, elsewhere the name of the folder or file."""
    return _CACHED.sub(r"\1", str(path)).split("/snapshots/")[0].rpartition("/")[2]


def _find_named(trained_on: str, bases: Sequence[BaseModel]) -> list[BaseModel]:
    """Returns the base models that a name or path means. Compares served names first, then sources.
    If none is equal, tries again without the ending that marks a quantised model."""
    name = _last_part(trained_on)
    for key in (name, _QUANTISED.sub("", name)):
        by_name = [base for base in bases if key and _last_part(base.name) == key]
        by_source = [base for base in bases if key and _last_part(base.source) == key]
        if found := by_name or by_source:
            return found
    return []


def _last_part(name: str) -> str:
    return source_of(Path(name)).lower() if name else ""


def _listed(bases: Sequence[BaseModel]) -> str:
    return ", ".join(base.name for base in bases)
